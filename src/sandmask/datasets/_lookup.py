"""Find datasets and environments by the names that users give."""

import inspect
import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from sandmask._arguments import PathLike
from sandmask.datasets import arrays, debug, hugging_face, image_sets, manifest, mnist, spawrious, spirals, wilds
from sandmask.datasets._base import DATASETS, Dataset, DatasetEntry
from sandmask.datasets._scan import plain
from sandmask.errors import SandmaskError
from sandmask.registry import closest

PARAMETERS = re.compile(r"(?P<source>.*?)(?P<parameters>(:\w+=[^:]*)*)", re.DOTALL)

# Modules for a user's own datasets, which are named by a file, a folder or a name on the Hub. Each has
# `recognizes(source)`, `entry_of(source, options)`, `absolute(source)` and the names of its OPTIONS.
OWN_KINDS = (hugging_face, manifest, arrays)
IMAGE_SETS = (
    image_sets.VLCS,
    image_sets.PACS,
    image_sets.OFFICE_HOME,
    image_sets.TERRA_INCOGNITA,
    image_sets.DOMAIN_NET,
    image_sets.SVIRO,
    wilds.WILDS_CAMELYON,
    wilds.WILDS_FMOW,
    *(mixture.images() for mixture in spawrious.MIXTURES),
)
for _entry in (  # in the order in which they are listed
    spirals.SPIRALS,
    mnist.COLORED_MNIST,
    mnist.ROTATED_MNIST,
    *(images.entry() for images in IMAGE_SETS),
    debug.DEBUG_28,
    debug.DEBUG_VECTOR,
):
    DATASETS.register(_entry)


def dataset_entry(name_or_path: str | Path) -> DatasetEntry:
    """Return the entry of a registered dataset, of a variant of one, or of your own data.

    A CSV, TSV or Parquet file is a manifest, an .npz file has arrays, and the names of Hugging Face datasets begin with
    "hf:". Any other name with a path separator is a folder, and so is the name of an existing folder if no dataset has
    this name. Parameters follow the name: "Spirals:seed=1:environments=8", "scans.csv:class=diagnosis".

    :param name_or_path: name of a dataset, or path of a folder, manifest or .npz file.
    """
    text = os.fspath(name_or_path)
    if is_registered(text) and not isinstance(name_or_path, Path):
        name, *parameters = text.split(":")
        known = DATASETS[name]
        if not parameters:
            return known
        if known.variant is None:
            raise SandmaskError(f"{known.name} has no parameters. Found {':'.join(parameters)!r} after its name.")
        return known.variant(_values(known.name, parameters, "seed=1:environments=8"))
    source, parameters = _parsed(text)
    if (kind := _own_kind(source)) is not None:
        options = _values(source, parameters, "domain=site")
        _check_options(source, options, list(kind.OPTIONS))
        entry: DatasetEntry = kind.entry_of(source, options)
        return entry
    if isinstance(name_or_path, Path) or is_own(text):
        return image_sets.folder_entry(Path(text))
    return DATASETS[text.partition(":")[0]]


def is_registered(name: str) -> bool:
    """Return whether this is the name of a registered dataset, or of a variant of one.

    :param name: the name.
    """
    return name.partition(":")[0] in DATASETS


def is_own(text: str) -> bool:
    """Whether this names a user's own data: a manifest, arrays, a Hugging Face dataset, or a folder."""
    if text == "" or is_registered(text):
        return False
    if "/" in text or os.sep in text or text == ".":
        return True
    return _own_kind(_parsed(text)[0]) is not None or os.path.isdir(text)  # noqa: PTH112 - never raises


def absolute(name: str) -> str:
    """Return a dataset's name in a form that does not depend on the current folder.

    This is the registered name, or the absolute path of your own data.

    :param name: name of a dataset, or path of your own data.
    """
    entry = dataset_entry(name)
    if is_registered(name):
        return entry.name
    source, parameters = _parsed(name)
    if (kind := _own_kind(source)) is not None:
        return ":".join([kind.absolute(source), *parameters])
    return os.path.abspath(Path(name).expanduser())  # noqa: PTH100 - a link stays one


def _own_kind(source: str) -> ModuleType | None:
    return next((kind for kind in OWN_KINDS if kind.recognizes(source)), None)


def _parsed(text: str) -> tuple[str, list[str]]:
    """Split a name or path from the parameters after it."""
    found = PARAMETERS.fullmatch(text)
    assert found is not None
    return found["source"], found["parameters"].split(":")[1:]


def _values(name: str, parameters: list[str], example: str) -> dict[str, str]:
    """Return the values of parameters by name."""
    values: dict[str, str] = {}
    for parameter in parameters:
        key, equals, value = parameter.partition("=")
        if not (key and equals and value) or key in values:
            raise SandmaskError(
                f"A parameter of {name} should be name=value, each once, as in '{name}:{example}'. Found {parameter!r}."
            )
        values[key] = value
    return values


def load_dataset(source: str | Path | DatasetEntry, data_dir: PathLike | None = None, **options: Any) -> Dataset:
    """Load a dataset by name, or your own data by path.

    :param source: name, path or entry.
    :param data_dir: folder of the datasets; see `data_folder` for the default.
    :param options: options of the dataset, such as `noise` of Spirals or `skip_corrupt` of image datasets.
    """
    entry = source if isinstance(source, DatasetEntry) else dataset_entry(source)
    parameters = inspect.signature(entry.load).parameters.values()
    allowed = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    _check_options(entry.name, options, allowed)
    loaded = entry.load(None if data_dir is None else Path(data_dir), **options)
    if not isinstance(loaded, Dataset):
        raise SandmaskError(f"`load` of {entry.name} should return a `Dataset`. Found {type(loaded).__name__}.")
    return loaded


def _check_options(dataset: str, options: Iterable[str], allowed: list[str]) -> None:
    for name in options:
        if name not in allowed:
            choices = closest(name, allowed) if allowed else "It has none."
            raise SandmaskError(f"{dataset} has no option {name!r}. {choices}")


def resolve_environment(dataset: Dataset | DatasetEntry, text: str | int) -> int:
    """Return the index of an environment that is given by its name in tables, the name of its folder, or its index.

    Names take precedence over indices: "15" is the second environment of RotatedMNIST. Case, spaces, hyphens inside of
    names, underscores and a percent sign are ignored unless they distinguish two environments.

    An integer that is the name of one environment and the index of another raises an error.

    :param dataset: dataset or entry.
    :param text: name or index.
    """
    if isinstance(text, int):
        _check_number(dataset, text)
    wanted = _simplified(str(text))
    for names in (dataset.environments, dataset.domains):
        if str(text) in names:
            return names.index(str(text))
    for names in (dataset.environments, dataset.domains):
        matching = [number for number, name in enumerate(names) if _simplified(name) == wanted]
        if len(matching) > 1:
            spelled = ", ".join(repr(names[number]) for number in matching)
            raise SandmaskError(
                f"{dataset.name} has several environments like {str(text)!r}: {spelled}. Spell it exactly."
            )
        if matching:
            return matching[0]
    n = len(dataset.environments)
    if wanted.isdecimal() and int(wanted) < n:
        return int(wanted)
    unknown = f"{dataset.name} has no environment {str(text)!r}."
    if "," in str(text):
        unknown += " Name several environments one by one: --test-env 0 --test-env 1, or in Python [0, 1]."
    if list(dataset.environments) == [str(number) for number in range(n)]:
        raise SandmaskError(f"{unknown} Its environments are 0 to {n - 1}.")
    extra = [name for name in dataset.domains if name not in dataset.environments]
    choices = closest(str(text), [*dataset.environments, *extra])
    raise SandmaskError(f"{unknown} {choices} Or give a number from 0 to {n - 1}.")


def double_meaning(dataset: Dataset | DatasetEntry, text: str | int) -> str | None:
    """Return a note if this is the name of one environment and the index of another; None otherwise.

    :param dataset: dataset or entry.
    :param text: name or index.
    """
    names, found = dataset.environments, resolve_environment(dataset, text)
    word = str(text).strip()
    number = int(word) if word.isdecimal() else found
    if number == found or number >= len(names):
        return None
    return (
        f"{word!r} is read as a name: {names[found]!r} is environment number {found} of {dataset.name}, and number "
        f"{number} is {names[number]!r}."
    )


def _check_number(dataset: Dataset | DatasetEntry, number: int) -> None:
    """Raise an error for an index that is also another environment's name, as "1" to "4" in a loop over range(4)."""
    names = dataset.environments
    if not 0 <= number < len(names) or str(number) not in (*names, *dataset.domains) or str(number) == names[number]:
        return
    raise SandmaskError(
        f"{dataset.name} has an environment {str(number)!r}, and {names[number]!r} is its environment number {number}. "
        f"Give the name as a string: {str(number)!r} or {names[number]!r}."
    )


def _simplified(name: str) -> str:
    sign = "-" if name.strip().startswith("-") else ""  # "-90%" is not "+90%"
    return sign + plain(name.strip()).rstrip("%")
