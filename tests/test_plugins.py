import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

import sandmask.plugins
from sandmask.algorithms import ALGORITHMS
from sandmask.cli._app import app
from sandmask.datasets import DATASETS, load_dataset
from sandmask.errors import SandmaskError
from sandmask.plugins import GROUP, TRACEBACK, VARIABLE, is_plugin_module, load_plugins, plugin_failures_named
from sandmask.training import make_spec, train_stack


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("sandmask_plugin"):
            del sys.modules[name]


def counting_plugin(folder: Path, name: str = "mine.py") -> tuple[Path, Path]:
    """A plugin that adds a line to a file each time it is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / name, folder / f"{name}.log"
    path.write_text(f"with open({str(log)!r}, 'a') as f:\n    f.write(__name__ + '\\n')\n")
    return path, log


def test_a_file_is_loaded_once_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log = counting_plugin(tmp_path)
    monkeypatch.chdir(tmp_path)
    load_plugins([path, str(path), Path("mine.py")])
    load_plugins(["./mine.py"])
    assert len(log.read_text().splitlines()) == 1


def test_what_a_plugin_registers_is_told_from_what_a_program_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker processes load plugins, and not the program that starts them."""
    for name in ("_entries", "_modules"):
        monkeypatch.setattr(ALGORITHMS, name, dict(getattr(ALGORITHMS, name)))
    lines = "from dataclasses import replace\nfrom sandmask.algorithms import ALGORITHMS\n"
    register = "ALGORITHMS.register(replace(ALGORITHMS['ERM'], name={!r}))\n"
    (tmp_path / "mine.py").write_text(lines + register.format("OfPlugin"))
    load_plugins([tmp_path / "mine.py"])
    exec(lines + register.format("OfProgram"), {"__name__": "__main__"})
    assert is_plugin_module(ALGORITHMS.module_of("OfPlugin"))
    assert ALGORITHMS.module_of("OfProgram") == "__main__"
    assert not is_plugin_module("__main__")


def test_two_files_of_one_name_are_two_plugins(tmp_path: Path) -> None:
    first, first_log = counting_plugin(tmp_path / "a")
    second, second_log = counting_plugin(tmp_path / "b")
    load_plugins([first, second])
    assert first_log.read_text() != second_log.read_text()


def test_the_environment_variable_names_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, logs = zip(*(counting_plugin(tmp_path / folder) for folder in "ab"), strict=True)
    monkeypatch.setenv(VARIABLE, ":".join(map(str, paths)))
    load_plugins()
    assert all(log.exists() for log in logs)


def test_a_plugin_can_define_dataclasses_and_be_found_in_sys_modules(tmp_path: Path) -> None:
    path = tmp_path / "data.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Point:\n    x: float = 1.0\n"
    )
    load_plugins([path])
    (module,) = (module for name, module in sys.modules.items() if name.startswith("sandmask_plugin_data_"))
    assert module.Point().x == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = unknown\n", r"bad\.py, line 2 failed: NameError: name 'unknown' is not defined"),
        ("x = 1\n\ndef f(:\n", r"bad\.py, line 3 failed: SyntaxError: "),
        ("import json\n\njson.loads('{')\n", r"bad\.py, line 3 failed: JSONDecodeError: "),
        ("def f():\n    raise ValueError('oh')\nf()\n", r"bad\.py, line 2 failed: ValueError: oh"),
        ("import sys\nsys.exit(0)\n", r"bad\.py, line 2 failed: SystemExit: 0"),
        ("import no_such_module_at_all\n", r"bad\.py, line 1 failed: ModuleNotFoundError: "),
    ],
)
def test_a_failing_plugin_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    for _ in range(2):  # a failed plugin is not taken for a loaded one
        with pytest.raises(SandmaskError, match=message):
            load_plugins([path])


def test_a_mended_plugin_loads(tmp_path: Path) -> None:
    path = tmp_path / "mended.py"
    path.write_text("oops")
    with pytest.raises(SandmaskError, match="line 1"):
        load_plugins([path])
    path.write_text("fine = True  # longer, so that no stale byte code is taken for it\n")
    load_plugins([path])


def test_a_missing_file_and_a_wrong_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match=r"There is no plugin file .*nowhere\.py"):
        load_plugins([tmp_path / "nowhere.py"])
    with pytest.raises(SandmaskError, match="There is no plugin file"):
        load_plugins([tmp_path])
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    with pytest.raises(SandmaskError, match=r"notes\.txt should be a Python file"):
        load_plugins([other])


def entry(value: str) -> EntryPoint:
    return EntryPoint(name="mine", value=value, group=GROUP)


def test_installed_plugins_are_loaded_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def installed(group: str) -> list[EntryPoint]:
        asked.append(group)
        return [entry("plugin_of_a_package")]

    monkeypatch.setattr(sandmask.plugins, "entry_points", installed)
    with pytest.raises(SandmaskError, match=r"installed plugin 'mine' \(plugin_of_a_package\).*uninstall it"):
        load_plugins()
    monkeypatch.setitem(sys.modules, "plugin_of_a_package", ModuleType("plugin_of_a_package"))
    load_plugins()
    assert asked == ["sandmask.plugins", "sandmask.plugins"]


def test_any_file_of_an_installed_package_is_a_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_a_user"
    package.mkdir()
    (package / "__init__.py").write_text("from package_of_a_user import parts\n")
    (package / "parts.py").write_text("def step():\n    raise KeyError('tau')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sandmask.plugins, "_sources", set())
    monkeypatch.setattr(sandmask.plugins, "entry_points", lambda group: [entry("package_of_a_user")])
    load_plugins()
    with pytest.raises(SandmaskError, match=r"parts\.py, line 2, failed: KeyError: 'tau'"), plugin_failures_named():
        sys.modules["package_of_a_user"].parts.step()


BROKEN = """
import torch
from sandmask.algorithms import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm, environment_risks

class Broken(ObjectiveAlgorithm):
    def objective(self, params, state, batch, hparams, key):
        risks = environment_risks(self.logits(params, batch, hparams), batch)
        return {}, {{}}

ALGORITHMS.register(AlgorithmEntry(name="Broken", summary="", paper="", build=Broken))
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("risks.max() if risks.max() > 0.5 else risks.mean()", "must not branch on a tensor's value.*torch.where"),
        ("risks.mean() * float(risks.max())", "must not branch on a tensor's value"),
        ("risks.mean() * torch.rand(())", "random numbers must come from `key`"),
        ("risks.mean() * hparams['tauu']", "KeyError: 'tauu'"),
        ("risks.mean() @ risks", "RuntimeError: "),
    ],
)
def test_a_plugin_that_fails_in_a_step_is_named_with_its_line(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ALGORITHMS, "_entries", dict(ALGORITHMS._entries))
    monkeypatch.setattr(sandmask.plugins, "_sources", set())
    path = tmp_path / "broken.py"
    path.write_text(BROKEN.format(code))
    arguments = ["train", "DebugVector", "Broken", "--test-env", "a", "--steps", "2", "--plugin", str(path)]
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--out", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert re.match(rf"error: The plugin {path}, line 8, failed: .*{said}", result.stderr)
    assert result.stderr.count("\n") == 1
    specs = [make_spec(DATASETS["DebugVector"], "Broken", [0], steps=2, seed=seed) for seed in range(2)]
    with pytest.raises(SandmaskError, match=rf"{path}, line 8, failed: .*{said}"):
        train_stack(specs, load_dataset("DebugVector"), torch.device("cpu"), tmp_path / "checkpoint.safetensors")
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises((RuntimeError, KeyError)):
        train_stack(specs, load_dataset("DebugVector"), torch.device("cpu"), tmp_path / "checkpoint.safetensors")


def test_memory_that_runs_out_is_not_the_plugins_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandmask.plugins, "_sources", set())
    path = tmp_path / "greedy.py"
    path.write_text("import torch\ndef step():\n    raise torch.OutOfMemoryError\n")
    load_plugins([path])
    module = next(module for name, module in sys.modules.items() if name.startswith("sandmask_plugin_greedy"))
    with pytest.raises(torch.OutOfMemoryError), plugin_failures_named():
        module.step()
