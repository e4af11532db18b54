"""Names of registered entries without importing torch, for shell completion and early checks.

Names are read from the source files without running them: importing the registries imports torch, which takes three
seconds. Files named in SANDMASK_PLUGINS are read the same way.
"""

import ast
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from sandmask._text import tell
from sandmask._torchrun import is_first
from sandmask.plugins import GROUP, named_files
from sandmask.registry import Registry, checked_parts, parts_of

_PACKAGE = Path(__file__).parents[1]
# By kind: our package with these entries, and the classes (or decorators) that register a name.
_KINDS = {
    "algorithm": ("algorithms", {"AlgorithmEntry"}),
    "dataset": ("datasets", {"DatasetEntry", "ImageSet", "Mixture"}),
    "selection rule": ("selection", {"SelectionRule", "selection_rule"}),
}

Complete = Callable[[str], list[str]]


@cache
def registered(kind: str) -> tuple[str, ...]:
    """The names of a kind that our package and the user's plugins register."""
    folder, records = _KINDS[kind]
    files = [*(_PACKAGE / folder).glob("*.py"), *map(Path, named_files())]
    return tuple(sorted({name for file in files for name in _names(file, records)}, key=str.lower))


def _names(file: Path, records: set[str]) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text) if any(record in text for record in records) else ast.Module([], [])
    except (OSError, SyntaxError, UnicodeDecodeError):
        return  # the command itself reports the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in records:
            named = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
            for value in [*named, *node.args[:1]][:1]:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def _among(names: Callable[[], tuple[str, ...]], separators: str = ",") -> Complete:
    """Complete one name, or the last one of several names that are separated by commas (or other separators)."""

    def complete(incomplete: str) -> list[str]:
        begin = 1 + max(incomplete.rfind(separator) for separator in separators)
        return [incomplete[:begin] + name for name in names() if name.startswith(incomplete[begin:])]

    return complete


algorithm = _among(lambda: registered("algorithm"), ",+")
dataset = _among(lambda: registered("dataset"))
rule = _among(lambda: (*registered("selection rule"), "all"))


def words(*choices: str) -> Complete:
    """Complete one of a few words."""
    return _among(lambda: choices)


@dataclass(frozen=True)
class _Name:
    name: str


def check_names(dataset: str, algorithm: str, plugins: Sequence[Path] | None = None) -> None:
    """Raise the registry's error for a dataset or an algorithm that does not exist, before torch is imported.

    With plugins, or once torch is imported, nothing is checked here: the registries do it.
    """
    if "torch" in sys.modules or plugins or named_files() or entry_points(group=GROUP):
        return
    datasets, algorithms = _catalogue("dataset"), _catalogue("algorithm")
    name = dataset.partition(":")[0]  # "Spirals" of "Spirals:seed=1"
    if name not in datasets and not _may_be_own(dataset):
        datasets[name]
    for part in checked_parts(algorithm):
        algorithms[part]


def put_in_order(dataset: str, algorithm: str, rule: str) -> tuple[str, str]:
    """The names of a dataset and an algorithm, exchanged if they were given in the wrong order, with a note.

    :param rule: what the note says about the order.
    """
    if not is_swapped(dataset, algorithm):
        return dataset, algorithm
    if is_first():
        tell(f"note: read as {dataset} on {algorithm}. {rule}")
    return algorithm, dataset


def is_swapped(dataset: str, algorithm: str) -> bool:
    """Whether the first name is that of an algorithm, and the second that of a dataset."""
    datasets, algorithms = _catalogue("dataset"), _catalogue("algorithm")
    is_dataset = algorithm.partition(":")[0] in datasets
    is_algorithm = all(part in algorithms for part in parts_of(dataset))
    return is_dataset and is_algorithm and dataset not in datasets and algorithm not in algorithms


def _catalogue(kind: str) -> Registry[_Name]:
    """A registry's names, read without importing it."""
    catalogue: Registry[_Name] = Registry(kind)
    for name in registered(kind):
        catalogue.register(_Name(name))
    return catalogue


def _may_be_own(dataset: str) -> bool:
    """Whether it may be a folder of images, a manifest, arrays or a Hugging Face dataset."""
    if any(separator in dataset for separator in {"/", os.sep}) or (dataset != "" and Path(dataset).is_dir()):
        return True
    return dataset.startswith("hf:") or dataset.partition(":")[0].lower().endswith((".csv", ".tsv", ".parquet", ".npz"))
