"""The page on hyperparameters: its examples run, its tables agree with the code."""

import doctest
import re
from pathlib import Path

import pytest

from sandmask.hparams import Scope, space_for

PAGE = Path(__file__).parents[2] / "docs" / "hyperparameters.md"
PLACES: dict[str, list[tuple[Scope, str]]] = {
    "MNIST sets": [("small-image", "ColoredMNIST"), ("small-image", "RotatedMNIST")],
    "image sets": [("image", "PACS"), ("image", "TerraIncognita")],
    "DomainNet": [("image", "DomainNet")],
    "Spirals": [("tabular", "Spirals")],
    "all": [("small-image", "ColoredMNIST"), ("image", "PACS"), ("tabular", "Spirals")],
}


def rows(heading: str) -> list[tuple[str, ...]]:
    """The rows of the table under a heading: (where, name, default, draw)."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    pattern = r"^\| ([^|]+) \| `(\w+)` \| ([^|]+) \| (.+) \|$"
    return [match.groups() for match in re.finditer(pattern, section, re.MULTILINE)]


def test_the_examples_run() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 6
    assert result.failed == 0


@pytest.mark.parametrize("row", rows("Ranges that come with the dataset"), ids=" ".join)
def test_the_table_of_datasets_agrees_with_the_code(row: tuple[str, ...]) -> None:
    where, name, default, draw = row
    for scope, dataset in PLACES[where]:
        found = space_for(scope, dataset, "ERM", (), "paper")[name]
        assert (f"{found.default:g}", str(found.draw)) == (default, draw)


def test_the_table_of_datasets_is_complete() -> None:
    listed = {(where, name) for where, name, _, _ in rows("Ranges that come with the dataset")}
    for where, places in PLACES.items():
        for scope, dataset in places if where not in ("all", "DomainNet") else []:
            for name in space_for(scope, dataset, "ERM", (), "paper"):
                assert (where, name) in listed or ("all", name) in listed


@pytest.mark.parametrize("row", rows("Ranges that come with the algorithm"), ids=" ".join)
def test_the_table_of_algorithms_agrees_with_the_code(row: tuple[str, ...]) -> None:
    from sandmask.algorithms import ALGORITHMS

    where, name, default, draw = row
    for algorithm in where.split(", "):
        entry = ALGORITHMS[algorithm]
        found = space_for("image", "PACS", entry.name, entry.hparams, "paper")[name]
        assert (f"{found.default:g}", str(found.draw)) == (default, draw)
