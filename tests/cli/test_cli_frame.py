import errno
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sandmask import _version
from sandmask.cli import SPINS, _app, main
from sandmask.cli._app import COMMANDS, Command
from sandmask.errors import SandmaskError

runner = CliRunner()
ENV = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}


def sandmask(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sandmask", *args], capture_output=True, text=True, env=ENV, timeout=60
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Install a function as `sandmask probe`."""

    def install(function: Callable[[], None]) -> None:
        module = types.ModuleType("sandmask.cli.probe")
        module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        module.probe = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "sandmask.cli.probe", module)
        monkeypatch.setattr(_app, "COMMANDS", (Command("probe", "A probe", "Run", "sandmask.cli.probe"),))

    return install


def test_alone_it_greets_with_what_people_do_first() -> None:
    result = sandmask()
    assert (result.returncode, result.stderr) == (0, "")
    assert "sandmask.backward(losses" in result.stdout
    assert "sandmask --help" in result.stdout


def test_the_greeting_has_three_things_to_do_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in _app.greeting()
    monkeypatch.setenv("NO_COLOR", "1")
    text = _app.greeting()
    assert "\x1b[" not in text
    assert [f"\n {number}  " in text for number in (1, 2, 3, 4)] == [True, True, True, False]
    for words in ("sandmask demo", "sandmask.backward", "sandmask train", "sandmask report", "sandmask doctor"):
        assert words in text


def test_the_lines_of_the_greeting_can_be_copied() -> None:
    names = {command.name: command for command in COMMANDS if command.exists}
    lines = [line for _, ways in _app.FIRST for line in ways if line.startswith("sandmask ")]
    assert lines
    for words in map(str.split, lines):
        names[words[1]].load().make_context(words[1], words[2:], resilient_parsing=False)
    assert not any("--hparam " in line for line in lines)  # masks work with the defaults, and not with any tau


def test_version() -> None:
    result = runner.invoke(_app.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"sandmask {_version.__version__}\n")


@pytest.mark.parametrize("own", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}], ids=str)
@pytest.mark.parametrize("load", [0.1, 2.0])
def test_threads_wait_briefly_on_a_busy_machine_unless_the_user_says_otherwise(
    load: float, own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in names} | own)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(sys, "argv", ["sandmask", "--version"])
    with pytest.raises(SystemExit):
        main()
    ours = {"GOMP_SPINCOUNT": SPINS} if load > 1 and not own else {}
    assert {k: v for k, v in os.environ.items() if k in names} == own | ours


def test_torch_reads_the_setting_only_after_the_command_has_made_it() -> None:
    code = "import sys, sandmask.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_lists_what_is_installed_and_nothing_else() -> None:
    result = sandmask("--help")
    assert result.returncode == 0
    for line in COMMANDS:
        assert (line.summary in result.stdout) == line.exists


@pytest.mark.parametrize(
    "args",
    [
        *((), ("--help",), ("--version",)),
        *((command, "--help") for command in ("list", "hparams", "train", "soup", "predict", "export", "data")),
        *(("sweep", command, "--help") for command in ("plan", "run", "models", "status")),
    ],
)
def test_help_imports_no_torch(args: tuple[str, ...]) -> None:
    code = (
        "import sys, json\nfrom sandmask.cli import main\n"
        f"sys.argv = ['sandmask', *{args!r}]\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code\n"
        "heavy = {'torch', 'pandas', 'sandmask.paper', 'torchvision', 'timm', 'matplotlib'} & set(sys.modules)\n"
        "print(json.dumps(sorted(heavy)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, timeout=60)
    assert json.loads(result.stdout.splitlines()[-1]) == [], result.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train Spirls ERM --test-env 0", "error: Unknown dataset 'Spirls'. Did you mean 'Spirals'?"),
        ("train Spirals sand --test-env 0", "error: Unknown algorithm 'sand'. Did you mean 'SANDMask'?"),
        ("hparams sand Spirals", "error: Unknown algorithm 'sand'. Did you mean 'SANDMask'?"),
    ],
)
def test_a_misspelled_name_is_refused_without_torch(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, "-m", "sandmask", *line.split()]
    result = subprocess.run(words, capture_output=True, text=True, env={**ENV, "PYTHONPATH": path}, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith(said)


def test_names_that_exist_pass_the_check_without_torch() -> None:
    code = (
        "import sys\nfrom sandmask.cli._completion import check_names, is_swapped\n"
        "for dataset in ('Spirals', 'spirals:seed=1', './photos'):\n    check_names(dataset, 'and-mask')\n"
        "print(is_swapped('ERM', 'Spirals:seed=1'), is_swapped('Spirals', 'ERM'), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, timeout=60)
    assert result.stdout == "True False False\n", result.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lits", "Did you mean 'list'? See: sandmask --help"),
        ("quux", "Choose from: demo, train"),
        ("--nope", "No such option: --nope. See: sandmask --help"),
        ("data downlod", "Did you mean 'download'? See: sandmask data --help"),
        ("train Spirals", "Missing argument"),
        ("train Spirals ERM --test-envv 0", "No such option: --test-envv. Did you mean --test-env? See:"),
        ("train Spirals ERM --foo 0", "No such option: --foo. See: sandmask train --help"),
        ("train Spirals ERM --test-env 0 --steps many", "Invalid value for '--steps'"),
        ("train Spirals ERM --test-env 0 --steps 0", "See: sandmask train --help"),
        ("train Spirals ERM IRM --test-env 0", "IRM"),
        ("list quux", "Choose from: algorithms"),
    ],
)
def test_a_line_that_is_not_understood_is_one_line_with_a_hint(line: str, said: str) -> None:
    result = runner.invoke(_app.app, line.split(), prog_name="sandmask")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.exists], ids=lambda line: line.name)
def test_every_command_says_no_to_an_unknown_option_in_one_line(line: Command) -> None:
    for name in getattr(line.load(), "commands", {"": None}):
        result = runner.invoke(_app.app, [line.name, *filter(None, [name]), "--no-such-thing"], prog_name="sandmask")
        assert result.exit_code == 2
        assert result.stderr.startswith("error: No such option: --no-such-thing")
        assert result.stderr.count("\n") == 1


def test_a_group_alone_shows_its_help() -> None:
    result = runner.invoke(_app.app, ["data"], prog_name="sandmask")
    assert "Usage: sandmask data" in result.stdout
    assert "download" in result.stdout
    assert (result.exit_code, result.stderr) == (2, "")


def test_a_users_mistake_is_one_line_and_status_2(command: Callable[[Callable[[], None]], None]) -> None:
    def probe() -> None:
        raise SandmaskError("tau should be in [0, 1]. Found 7.")

    command(probe)
    result = runner.invoke(_app.app, ["probe"])
    assert result.exit_code == 2
    assert result.stderr == "error: tau should be in [0, 1]. Found 7.\n"
    assert result.stdout == ""


def test_an_interrupt_is_a_short_line_and_status_130(command: Callable[[Callable[[], None]], None]) -> None:
    def probe() -> None:
        raise KeyboardInterrupt

    command(probe)
    result = runner.invoke(_app.app, ["probe"])
    assert (result.exit_code, result.stderr) == (130, "\ninterrupted\n")


def test_a_bug_keeps_its_traceback(command: Callable[[Callable[[], None]], None]) -> None:
    def probe() -> None:
        raise ZeroDivisionError

    command(probe)
    assert isinstance(runner.invoke(_app.app, ["probe"]).exception, ZeroDivisionError)


def test_a_module_with_an_app_is_a_group_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer(help="Look after data.")

    @app.command()
    def where() -> None:
        """Say where."""
        typer.echo("here")

    @app.command()
    def verify() -> None:
        """Check."""

    module = types.ModuleType("sandmask.cli.probe")
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sandmask.cli.probe", module)
    monkeypatch.setattr(_app, "COMMANDS", (Command("probe", "A probe", "Run", "sandmask.cli.probe"),))
    assert runner.invoke(_app.app, ["probe", "where"]).output == "here\n"
    shown = runner.invoke(_app.app, ["probe", "--help"]).output
    assert "Look after data." in shown
    assert "--install-completion" not in shown


def test_only_the_command_that_runs_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = Command.load

    def recorded(self: Command) -> object:
        loaded.append(self.name)
        return load(self)

    monkeypatch.setattr(Command, "load", recorded)
    assert runner.invoke(_app.app, ["--help"]).exit_code == 0
    assert loaded == []
    assert runner.invoke(_app.app, ["list", "--help"]).exit_code == 0
    assert loaded == ["list"]


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.exists], ids=lambda line: line.name)
def test_every_command_explains_itself_and_single_ones_with_an_example(line: Command) -> None:
    subcommands = getattr(line.load(), "commands", {})
    for args in ([line.name], *([line.name, name] for name in subcommands)):
        result = runner.invoke(_app.app, [*args, "--help"], prog_name="", env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        assert subcommands or f"sandmask {line.name} " in result.output


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EROFS, "Read-only file system", "runs/a"), "error: runs/a: Read-only file system.\n"),
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device.\n"),
        (FileExistsError(errno.EEXIST, "File exists", "a.txt"), "error: a.txt: this is a file, not a folder.\n"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a.txt/b"), "error: a.txt/b: Not a directory.\n"),
    ],
)
def test_what_the_disk_refuses_is_one_line(
    command: Callable[[Callable[[], None]], None], error: OSError, said: str
) -> None:
    def probe() -> None:
        raise error

    command(probe)
    result = runner.invoke(_app.app, ["probe"])
    assert (result.exit_code, result.stderr) == (2, said)


def test_a_current_folder_that_is_gone_is_named(
    command: Callable[[Callable[[], None]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    command(lambda: print(Path("runs").absolute()))
    result = runner.invoke(_app.app, ["probe"])
    assert (result.exit_code, result.stderr) == (2, "error: the current folder: No such file or directory.\n")


def test_a_terminal_of_unknown_width_has_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setattr(_app, "app", lambda prog_name: None)
    _app.run()
    assert "COLUMNS" not in os.environ


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.exists], ids=lambda line: line.name)
def test_help_fits_a_terminal_of_80_columns(line: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for names in ([], [line.name], *([line.name, name] for name in getattr(line.load(), "commands", {}))):
        shown = runner.invoke(_app.app, [*names, "--help"], prog_name="sandmask").stdout
        assert "Usage: sandmask" in shown
        assert "…" not in shown  # a name or a word that was cut
        assert "<bool>" not in shown  # a flag takes no word


def test_paragraphs_of_help_flow(command: Callable[[Callable[[], None]], None]) -> None:
    def probe() -> None:
        """Probe.

        One line
        and another.
        """

    command(probe)
    assert "One line and another." in runner.invoke(_app.app, ["probe", "--help"]).stdout
