"""The reference page has every public package, and every public name and parameter in it is described."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sandmask"
PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
GUEST = "sandmask.paper"  # may be left out
NAMED = re.findall(r"^::: (sandmask[\w.]*)$", PAGE, re.MULTILINE)
SHOWN = [name for name in NAMED if name != GUEST or importlib.util.find_spec(GUEST)]


def public_packages() -> list[str]:
    """Our packages and single modules; the command line is for the terminal."""
    found = [path.stem for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"]
    return sorted(f"sandmask.{name}" for name in found if not name.startswith("_") and name != "cli")


def test_every_public_package_is_there() -> None:
    assert {"sandmask", *public_packages()} <= set(SHOWN)


@pytest.mark.parametrize("module", SHOWN)
def test_public_names_are_described(module: str) -> None:
    package = importlib.import_module(module)
    assert package.__doc__
    for name in getattr(package, "__all__", ()):
        value = getattr(package, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{module}.{name} has no docstring"


@pytest.mark.parametrize("module", [name for name in SHOWN if hasattr(importlib.import_module(name), "__all__")])
def test_parameters_of_public_functions_are_described(module: str) -> None:
    package = importlib.import_module(module)
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isfunction(value):
            described = re.findall(r"^:param (\w+): \S", inspect.getdoc(value) or "", re.MULTILINE)
            assert sorted(described) == sorted(inspect.signature(value).parameters), f"{module}.{name}: {described}"
