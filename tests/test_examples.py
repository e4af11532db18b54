"""Every script in examples/ runs, with the arguments declared here, and prints what it promises."""

import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from textwrap import indent

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@dataclass(frozen=True)
class Example:
    """How a script is run: in this process, or by a launcher."""

    arguments: tuple[str, ...]
    prints: str
    launcher: tuple[str, ...] = ()


RUNS = {
    "plain_pytorch.py": Example(("--steps", "40"), r"SAND-mask +\d+\.\d% +\d+\.\d%"),
    "ilc_spirals.py": Example(("--steps", "2"), r"SAND-mask, rescaled +\d+\.\d% +\d+\.\d%\n\d+\.\d seconds a run"),
    "mixed_precision.py": Example(("--steps", "6"), r"accuracy \d+\.\d%"),
    # The frameworks warn of this and that when they are imported: not in this process.
    "lightning_module.py": Example(
        ("--epochs", "2"), r"AND-mask +\d+\.\d+ +\d+\.\d% +\d+\.\d%", launcher=(sys.executable,)
    ),
    "hugging_face_trainer.py": Example(("--steps", "4"), r"AND-mask +\d+\.\d% +\d+\.\d%", launcher=(sys.executable,)),
    "frozen_features.py": Example(
        ("pictures", "features.npz", "--network", "test_resnet.r160_in1k", "--weights", "none"),
        r"features\.npz: \d+ features of 6 images in 3 domains",
    ),
    "distributed_environments.py": Example(
        (),
        r"largest difference to one process: \d\.\de-0[6-9]",
        launcher=(*TORCHRUN, "--standalone", "--nproc-per-node", "2"),
    ),
}
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_every_script_is_declared() -> None:
    assert sorted(RUNS) == SCRIPTS


LARGER_MODELS = ("frozen_features.py", "ilc_spirals.py")


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in LARGER_MODELS])
def test_small_models_use_one_thread(script: str) -> None:
    """More threads wait for each other: seconds become minutes."""
    assert "torch.set_num_threads(1)" in (EXAMPLES / script).read_text(encoding="utf-8")


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_runs(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    example = RUNS[script]
    monkeypatch.chdir(tmp_path)
    for place in product(("north", "south", "west"), ("cat", "dog")):
        folder = Path("pictures", *place)
        folder.mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(folder / "1.png")
    if example.launcher:
        command = [*example.launcher, str(EXAMPLES / script), *example.arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        output = done.stdout
    else:
        monkeypatch.setattr(sys, "argv", [script, *example.arguments])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        output = capsys.readouterr().out
    assert re.search(example.prints, output), output


SHOWN = re.compile(r"<!-- not run: part of examples/(\w+\.py), [^\n]* -->\n```python\n(.*?)```", re.DOTALL)


def test_what_the_documentation_shows_of_a_script_is_in_it() -> None:
    page = (EXAMPLES.parent / "docs" / "own-loop.md").read_text(encoding="utf-8")
    shown = SHOWN.findall(page)
    assert {script for script, _ in shown} == {"lightning_module.py", "hugging_face_trainer.py"}
    for script, block in shown:
        text = (EXAMPLES / script).read_text(encoding="utf-8")
        indented = [indent(block, depth * "    ") for depth in range(3)]
        assert any(each in text for each in indented), f"docs/own-loop.md shows another {script}"


def test_the_gallery_has_every_example() -> None:
    page = (EXAMPLES.parent / "docs" / "gallery.md").read_text(encoding="utf-8")
    examples = [path.relative_to(EXAMPLES.parent) for path in EXAMPLES.rglob("*.*") if path.suffix in (".py", ".ipynb")]
    assert [path.as_posix() for path in sorted(examples) if f"`{path.as_posix()}`" not in page] == []
