"""The examples in the docstrings of masks and gradients give what they show."""

import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import sandmask
import sandmask.gradients
import sandmask.masks
from sandmask.masks import Mask


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


def test_the_page_on_masks_lists_every_mask_with_its_parameters() -> None:
    page = (Path(__file__).parents[2] / "docs" / "masks.md").read_text(encoding="utf-8").partition("## Variants")[2]
    masks = [each for each in vars(sandmask.masks).values() if isinstance(each, type) and issubclass(each, Mask)]
    for mask in masks:
        if mask is not Mask:
            assert f"`{mask.__name__}(" in page
            assert all(name in page for name in inspect.signature(mask).parameters)
