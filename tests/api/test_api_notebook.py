"""Progress in a notebook, and the example notebook itself where Jupyter is installed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import sandmask
from sandmask.api import _progress

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
HAS_JUPYTER = all(importlib.util.find_spec(name) for name in ("nbclient", "nbformat", "ipykernel"))
SMALL: dict[str, Any] = {"steps": 3, "hparams": {"mlp_width": 8, "batch_size": 8}, "device": "cpu"}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook would show: this process looks like one."""
    texts: list[str] = []

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        texts.append(data["text/plain"])
        return SimpleNamespace(update=lambda new, raw: texts.append(new["text/plain"]))

    module = ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setattr(
        _progress, "Console", lambda **options: Console(**options) if options else SimpleNamespace(is_jupyter=True)
    )
    return texts


def test_a_run_shows_a_line_that_is_replaced(shown: list[str], tmp_path: Path) -> None:
    sandmask.train("DebugVector", "ERM", "a", out=tmp_path, **SMALL)
    assert shown[-1].startswith("ERM: step 3/3  loss")


def test_a_sweep_shows_how_far_it_is(shown: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"test_envs": "a", "n_hparams": 1, "n_trials": 1, "workers": 1, "calibrate": False}
    sandmask.sweep(tmp_path, "DebugVector", "ERM", **asked, **SMALL)
    assert "1/1 runs done" in shown[-1]
    said = capsys.readouterr()
    assert "0/1 runs done; records in" in said.out
    assert not said.err


@pytest.mark.skipif(not HAS_JUPYTER, reason="needs nbclient, nbformat and ipykernel")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.paper] if "paper" in path.stem else []) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_an_example_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nbclient, nbformat = importlib.import_module("nbclient"), importlib.import_module("nbformat")
    notebook = nbformat.read(path, 4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in shown if output.output_type == "error"]
    expected = {
        "first_sweep": "4/4 runs done",
        "mask_in_my_loop": "unseen domains: plain gradient",
        "my_own_data": "2/2 runs done",
        "figure_of_the_paper": "data:image/png;base64",
    }
    assert any(expected[path.stem] in str(output) for output in shown)


@pytest.mark.skipif(not HAS_JUPYTER, reason="needs nbclient, nbformat and ipykernel")
def test_an_interrupted_kernel_leaves_a_checkpoint(tmp_path: Path) -> None:
    manager_of = importlib.import_module("jupyter_client.manager").start_new_kernel
    manager, client = manager_of(cwd=str(tmp_path), kernel_name="python3")
    call = (
        "sandmask.train('DebugVector', 'ERM', 0, steps={steps}, checkpoint_every=1000, device='cpu', out='run', "
        "hparams=dict(mlp_width=8, batch_size=8), progress={progress})"
    )
    try:
        client.execute_interactive("import sandmask", timeout=120)
        endless = client.execute(call.format(steps=10**6, progress=True))
        while client.get_iopub_msg(timeout=120)["msg_type"] not in ("display_data", "update_display_data"):
            pass  # the first line of progress: it trains
        manager.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=120))["parent_header"]["msg_id"] != endless:
            pass
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
