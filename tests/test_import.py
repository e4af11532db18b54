"""`import sandmask` is light, every public name resolves, and no file is long."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sandmask
import sandmask.gradients
import sandmask.masks
from sandmask.records import write_archive
from sandmask.records.testing import made_up_sweep

HEAVY = [
    "PIL",
    "matplotlib",
    "pandas",
    "pyarrow",
    "ray",
    "rich",
    "safetensors",
    "submitit",
    "tensorboard",
    "timm",
    "torchvision",
    "typer",
]


def test_imports_are_light(tmp_path: Path) -> None:
    """Torch itself comes with the first name that is used. One process shows all: its start takes seconds."""
    write_archive(made_up_sweep(["ERM"]), tmp_path / "some.records.parquet")
    code = f"""
import sys, sandmask
sandmask.backward, sandmask.SANDMask, sandmask.distributed
print("torch" in sys.modules, set({HEAVY}) & set(sys.modules))
import sandmask.networks
print({{"timm", "torchvision", "pandas"}} & set(sys.modules))
from sandmask.records import read_runs
print(len(read_runs({str(tmp_path)!r})) > 0, "pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True set()", "set()", "True False"]


def test_the_first_step_of_a_run_loads_no_compiler(tmp_path: Path) -> None:
    """Torch imports one, with sympy, from here and there: two seconds before the first step."""
    code = f"""
import sys, sandmask
for algorithm in ("ERM", "SANDMask"):
    out = {str(tmp_path)!r} + algorithm
    sandmask.train("DebugVector", algorithm, 0, steps=1, device="cpu", progress=False, out=out)
    print("sympy" in sys.modules, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 4


@pytest.mark.parametrize("module", [sandmask, sandmask.masks, sandmask.gradients, sandmask.distributed])
def test_every_public_name_resolves(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("name", sorted(sandmask._LAZY))
def test_lazy_names_are_listed_and_are_those_of_their_modules(name: str) -> None:
    assert name in sandmask.__all__
    assert name in dir(sandmask)
    __import__(sandmask._LAZY[name])
    assert getattr(sandmask, name) is getattr(sys.modules[sandmask._LAZY[name]], name)


def test_every_module_of_the_documentation_is_an_attribute() -> None:
    """`import sandmask` is enough for `sandmask.api.Sweep` and `sandmask.datasets.load_dataset`."""
    pages = [path.read_text(encoding="utf-8") for path in (Path(__file__).parents[1] / "docs").rglob("*.md")]
    found = {name for page in pages for name in re.findall(r"\bsandmask\.(\w+)\.\w+", page)}
    assert {"api", "datasets", "networks"} <= found
    code = "import sandmask\n" + "".join(f"sandmask.{name}.__name__\n" for name in sorted(found))
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["ORMask", "_ORMask"])
def test_names_that_do_not_exist(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'sandmask' has no attribute '{name}'"):
        getattr(sandmask, name)


def test_version() -> None:
    assert sandmask.__version__.count(".") == 2


def test_masks_do_without_the_private_functions_of_torch() -> None:
    code = """
import torch, torch.func
from torch._C import _functorch
for name in ("TransformType", "get_interpreter_stack", "peek_interpreter_stack"):
    delattr(_functorch, name)
import sandmask.masks
gradients = torch.tensor([[1.0, 2.0], [3.0, -2.0]])
print(sandmask.masks.ANDMask(1.0)(gradients))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("tensor([2., 0.])"), done.stderr


def test_no_file_is_longer_than_350_lines() -> None:
    root = Path(__file__).parents[1]
    files = [path for name in ("src", "tests", "benchmarks", "examples") for path in (root / name).rglob("*.py")]
    assert len(files) > 300
    assert [path for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 350] == []
