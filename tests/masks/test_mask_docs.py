"""The examples in the docstrings of masks and gradients give what they show."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import sandmask
import sandmask.gradients
import sandmask.masks


def modules() -> list[ModuleType]:
    found = [sandmask, sandmask.masks]
    for package in (sandmask.masks, sandmask.gradients):
        names = [info.name for info in pkgutil.iter_modules(package.__path__) if info.name != "_triton"]
        found += [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return [module for module in found if any(test.examples for test in doctest.DocTestFinder().find(module))]


def test_there_are_examples() -> None:
    assert {module.__name__ for module in modules()} >= {
        "sandmask",
        "sandmask.masks",
        "sandmask.masks._and",
        "sandmask.masks._sand",
        "sandmask.gradients._backward",
        "sandmask.gradients._validator",
    }


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_examples_in_docstrings(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0
