"""Shell completion: asked as a shell asks, through environment variables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sandmask.algorithms import ALGORITHMS
from sandmask.cli import _app, _completion
from sandmask.datasets import DATASETS
from sandmask.selection import RULES

runner = CliRunner()


def asked(line: str, shell: str = "bash", **more: str) -> dict[str, str]:
    """What a shell puts into the environment when TAB is pressed at the end of the line."""
    return {
        "_SANDMASK_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
        "_TYPER_COMPLETE_ARGS": line,
        **more,
    }


def ask(line: str, shell: str = "bash", **more: str) -> list[str]:
    """What the shell is offered."""
    result = runner.invoke(_app.app, env=asked(line, shell, **more), prog_name="sandmask")
    assert result.stderr == ""
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sandmask tr", ["train"]),
        ("sandmask data ver", ["verify"]),
        ("sandmask train --test", ["--test-env"]),
        ("sandmask train Spi", ["Spirals"]),
        ("sandmask train Spirals VR", ["VREx"]),
        ("sandmask train Spirals ERM --space d", ["domainbed"]),
        ("sandmask list d", ["datasets"]),
        ("sandmask sweep run runs --algorithms ERM,IG", ["ERM,IGA"]),
        ("sandmask sweep run runs --executor s", ["slurm"]),
        ("sandmask report runs --selection or", ["oracle"]),
    ],
)
def test_bash_is_offered_commands_options_and_values(line: str, expected: list[str]) -> None:
    assert ask(line) == expected


def test_zsh_and_fish_are_served_too() -> None:
    assert '"Spirals"' in "".join(ask("sandmask train Spi", "zsh"))
    assert ask("sandmask train Spi", "fish", _TYPER_COMPLETE_FISH_ACTION="get-args") == ["Spirals"]


@pytest.mark.parametrize(
    "line", ["sandmask train Spirals VR", "sandmask sweep run runs --algorithms VR", "sandmask data download P"]
)
def test_nothing_heavy_is_loaded(line: str) -> None:
    code = (
        "import sys\nfrom sandmask.cli import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    env = {**os.environ, **asked(line)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.split() in (["VREx"], ["PACS"])
    assert done.stderr == "False\n"


def test_the_names_read_off_the_files_are_those_of_the_registries() -> None:
    ours = {name for name, entry in ALGORITHMS.items() if entry.build.__module__.startswith("sandmask.")}
    assert set(_completion.algorithm("")) == ours
    assert set(_completion.dataset("")) == set(DATASETS)
    assert set(_completion.rule("")) == {*RULES, "all"}


def test_the_last_of_several_names_is_completed() -> None:
    assert _completion.algorithm("ERM,VR") == ["ERM,VREx"]


def test_names_of_plugins_are_read_without_running_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, broken = tmp_path / "mine.py", tmp_path / "broken.py"
    plugin.write_text("raise SystemExit\nAlgorithmEntry('Mine', build=print)\nAlgorithmEntry(name=f'{1}')\n")
    broken.write_text("AlgorithmEntry(")
    monkeypatch.setenv("SANDMASK_PLUGINS", os.pathsep.join([str(plugin), str(broken), str(tmp_path / "absent.py")]))
    _completion.registered.cache_clear()
    try:
        assert _completion.algorithm("Mi") == ["Mine", "Mixup"]
    finally:
        _completion.registered.cache_clear()


def test_it_can_be_installed(tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    code = "from sandmask.cli import main; main()"
    command = [sys.executable, "-c", code, "--install-completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    script = tmp_path / ".bash_completions" / "sandmask.sh"
    assert "_SANDMASK_COMPLETE" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()
