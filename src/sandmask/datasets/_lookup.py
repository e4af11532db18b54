"""Find datasets and environments by the names that users give."""

import inspect
import os
from pathlib import Path
from typing import Any

from sandmask.datasets import image_folder
from sandmask.datasets._base import DATASETS, Dataset, DatasetEntry
from sandmask.datasets._location import plain
from sandmask.errors import SandmaskError
from sandmask.registry import closest


def dataset_entry(name_or_path: str | Path) -> DatasetEntry:
    """Return the entry of a registered dataset, of a variant of one, or of a folder of images.

    A name with a path separator is a folder, and so is the name of an existing folder that is not a dataset's name.
    Generated datasets take parameters after the name: "Spirals:seed=1:environments=8".

    :param name_or_path: name of a dataset, or path of a folder.
    """
    text = os.fspath(name_or_path)
    separators = {"/", os.sep} | ({os.altsep} if os.altsep else set())
    is_path = isinstance(name_or_path, Path) or any(separator in text for separator in separators) or text == "."
    if is_path or (text != "" and not is_registered(text) and _is_folder(text)):
        return image_folder.entry_of(Path(text))
    name, *parameters = text.split(":")
    return _variant(DATASETS[name], parameters) if parameters else DATASETS[text]


def _is_folder(text: str) -> bool:
    try:
        return Path(text).is_dir()
    except (OSError, ValueError):  # too long for a name of a file
        return False


def is_registered(name: str) -> bool:
    """Return whether this is the name of a registered dataset, or of a variant of one.

    :param name: the name.
    """
    return name.partition(":")[0] in DATASETS


def _variant(entry: DatasetEntry, parameters: list[str]) -> DatasetEntry:
    if entry.variant is None:
        raise SandmaskError(f"{entry.name} has no parameters. Found {':'.join(parameters)!r} after its name.")
    values = {}
    for parameter in parameters:
        name, equals, value = parameter.partition("=")
        if not (name and equals and value) or name in values:
            example = f"{entry.name}:seed=1:environments=8"
            raise SandmaskError(
                f"A parameter of {entry.name} should be name=value, each once, as in {example!r}. Found {parameter!r}."
            )
        values[name] = value
    return entry.variant(values)


def load_dataset(source: str | Path | DatasetEntry, data_dir: str | Path | None = None, **options: Any) -> Dataset:
    """Load a dataset by name, or a folder of images by path.

    :param source: name, path or entry.
    :param data_dir: folder of the datasets; see `data_folder` for the default.
    :param options: options of the dataset, such as `noise` of Spirals or `skip_corrupt` of image datasets.
    """
    entry = source if isinstance(source, DatasetEntry) else dataset_entry(source)
    allowed = _option_names(entry)
    for name in options:
        if name not in allowed:
            choices = closest(name, allowed) if allowed else "It has none."
            raise SandmaskError(f"{entry.name} has no option {name!r}. {choices}")
    return entry.load(None if data_dir is None else Path(data_dir), **options)


def resolve_environment(dataset: Dataset | DatasetEntry, text: str | int) -> int:
    """Return the index of an environment given by its name in tables, its folder's name, or its index.

    Names take precedence over numbers: "15" is the second environment of RotatedMNIST. Case, spaces and a percent sign
    are ignored unless they distinguish two environments.

    :param dataset: dataset or entry.
    :param text: name or number.
    """
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
    if list(dataset.environments) == [str(number) for number in range(n)]:
        raise SandmaskError(f"{unknown} Its environments are 0 to {n - 1}.")
    extra = [name for name in dataset.domains if name not in dataset.environments]
    choices = closest(str(text), [*dataset.environments, *extra])
    raise SandmaskError(f"{unknown} {choices} Or a number from 0 to {n - 1}.")


def _simplified(name: str) -> str:
    sign = "-" if name.strip().startswith("-") else ""  # "-90%" is not "+90%"
    return sign + plain(name.strip()).rstrip("%")


def _option_names(entry: DatasetEntry) -> list[str]:
    parameters = inspect.signature(entry.load).parameters.values()
    return [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
