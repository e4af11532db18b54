"""Hugging Face datasets of images: by name on the Hub, from a folder of `save_to_disk`, or from Parquet files.

hf:flwrlabs/pacs                              columns image, label and domain
hf:saved/scans:label=diagnosis:domain=site    other columns, and a folder on this machine
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandmask._online import hub_if_reachable
from sandmask._text import described
from sandmask.datasets._base import DatasetEntry
from sandmask.datasets._tree import Listed, Row
from sandmask.datasets.image_sets import SAMPLED_BYTES, SAMPLED_FILES, own_entry
from sandmask.errors import SandmaskError
from sandmask.registry import closest

if TYPE_CHECKING:
    from datasets import Dataset as Rows

PREFIX = "hf:"
COLUMNS = ("image", "label", "domain")
OPTIONS = (*COLUMNS, "split", "config")


def recognizes(source: str) -> bool:
    """Whether this names a Hugging Face dataset: with the prefix, or as a folder that `save_to_disk` wrote."""
    return source.startswith(PREFIX) or _is_saved(source)


def absolute(source: str) -> str:
    """Return the name of a dataset, with an absolute path if it names files on this machine."""
    name = source.removeprefix(PREFIX)
    return f"{PREFIX}{os.path.abspath(name) if _is_here(name) else name}"  # noqa: PTH100 - a link stays one


def entry_of(source: str, options: Mapping[str, str]) -> DatasetEntry:
    """Return a registry entry for the images of a Hugging Face dataset.

    The name of the entry is the name of the dataset and a hash of its rows, such as `pacs-3f2a9c51`.

    :param source: "hf:" and a name on the Hub, a folder or a Parquet file; or a folder that `save_to_disk` wrote.
    :param options: names of the columns `image`, `label` and `domain`; `split` if there are several splits, as in
        "train+test"; `config` if there are several configurations.
    """
    if find_spec("datasets") is None:
        raise SandmaskError(f"{source} needs the package `datasets`: install sandmask[huggingface].")
    name = source.removeprefix(PREFIX)
    if not name:
        raise SandmaskError(f"{PREFIX} lacks a name. Name a dataset of the Hub, a folder or a file: {PREFIX}OWNER/NAME")
    rows = _load(name, options.get("split"), options.get("config"))
    if not len(rows):
        raise SandmaskError(f"{source} has no rows.")
    image, label, domain = (_column(source, rows, what, options.get(what, what)) for what in COLUMNS)
    classes, labels = _names(source, rows, label)
    domains, origins = _names(source, rows, domain)
    names = (f"row {number}" for number in range(len(rows)))
    read = partial(_content, _images(source, rows, image), image)
    listed = Listed(list(map(Row, names, labels, origins)), read)
    return own_entry(
        name.rstrip("/").rpartition("/")[2].removesuffix(".parquet"),
        _rows_id(listed.rows, read),
        domains,
        description="A Hugging Face dataset",
        classes=classes,
        root=Path(f"{PREFIX}{name}"),
        table=lambda _: listed,
    )


def _content(rows: "Rows", column: str, name: str) -> bytes:
    """Return an encoded image, given the name of its row, such as "row 7"."""
    found: dict[str, Any] | None = rows[int(name.removeprefix("row "))][column]
    if found is None:
        return b""  # cannot be decoded, which is reported
    content: bytes = Path(found["path"]).read_bytes() if found["bytes"] is None else found["bytes"]
    return content


def _images(text: str, rows: "Rows", column: str) -> "Rows":
    """Return a column of images. It may have images, bytes or paths, which are read from the disk when needed."""
    from datasets import Image

    try:
        return rows.select_columns(column).cast_column(column, Image(decode=False))
    except (TypeError, ValueError, NotImplementedError) as error:
        kind = rows.features[column]
        raise SandmaskError(f"{text}: the column {column!r} does not hold images. It holds {kind}.") from error


def _load(source: str, split: str | None, config: str | None) -> "Rows":
    """Return the rows of the only split, or of the requested splits."""
    from datasets import DatasetDict, concatenate_datasets

    found = _open(source, config)
    if not isinstance(found, DatasetDict):
        return found
    wanted = list(dict.fromkeys(split.split("+"))) if split is not None else list(found)
    for name in wanted:
        if name not in found:
            raise SandmaskError(f"{PREFIX}{source} has no split {name!r}. {closest(name, list(found))}")
    if split is None and len(wanted) > 1:
        raise SandmaskError(
            f"{PREFIX}{source} has several splits: {', '.join(found)}. Choose one with "
            f"{PREFIX}{source}:split={wanted[0]}, or several with split={'+'.join(wanted)}"
        )
    return concatenate_datasets([found[name] for name in wanted])


def _open(source: str, config: str | None) -> Any:
    from datasets.utils import disable_progress_bars, enable_progress_bars

    from datasets import load_dataset, load_from_disk

    disable_progress_bars()
    try:
        if _is_saved(source):
            return load_from_disk(source)
        if source.lower().endswith(".parquet") and _is_here(source):
            return load_dataset("parquet", data_files=source)
        if _is_here(source):
            return load_dataset(os.path.abspath(source), config)  # noqa: PTH100
        with hub_if_reachable() as hub:
            try:
                return load_dataset(source, config)
            except ConnectionError as error:
                reason = "is not on the Hub" if hub else "is not on this machine, and huggingface.co cannot be reached"
                raise SandmaskError(
                    f"{PREFIX}{source} {reason}. Give the name of a dataset, or a folder that `save_to_disk` wrote on "
                    f"a connected machine: {PREFIX}FOLDER"
                ) from error
    except IndexError as error:  # raised by `load_from_disk`
        raise SandmaskError(f"{PREFIX}{source} has no rows.") from error
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, SandmaskError):
            raise
        raise SandmaskError(f"{PREFIX}{source} cannot be loaded: {described(error)}") from error
    finally:
        enable_progress_bars()


def _is_here(source: str) -> bool:
    return os.path.exists(source)  # noqa: PTH110 - False for names that cannot be paths


def _is_saved(source: str) -> bool:
    """Whether this is a folder that `save_to_disk` wrote."""
    return any(os.path.isfile(Path(source, name)) for name in ("dataset_dict.json", "state.json"))  # noqa: PTH113 - as above


def _column(text: str, rows: "Rows", name: str, own: str) -> str:
    if own not in rows.column_names:
        raise SandmaskError(
            f"{text} has no column {own!r}. Its columns: {', '.join(rows.column_names)}. Say which one holds the "
            f"{name}: {text}:{name}=COLUMN"
        )
    return own


def _names(text: str, rows: "Rows", column: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the different values of a column as text, in order, and the value of each row."""
    values: list[Any] = list(rows[column])
    for missing in (None, ""):
        if missing in values:
            raise SandmaskError(f"{text}, row {values.index(missing)}: no {column}.")
    spelled = getattr(rows.features[column], "names", None)  # of a ClassLabel
    if not all(isinstance(value, str | int) for value in values):
        raise SandmaskError(
            f"{text}: the column {column!r} should hold names or numbers. It holds {rows.features[column]}."
        )
    there: Sequence[Any] = sorted(set(values))
    if spelled is not None and -1 in there:
        raise SandmaskError(f"{text}, row {values.index(-1)}: no {column} (-1).")
    text_of = {value: str(value) if spelled is None else spelled[value] for value in there}
    return tuple(text_of[value] for value in there), [text_of[value] for value in values]


def _rows_id(rows: Sequence[Row], read: Callable[[str], bytes]) -> str:
    """Return a hash of the classes and domains of all rows, and of some images."""
    total = hashlib.sha256()
    for row in rows:
        total.update(f"{row.label}\0{row.domain}\0".encode(errors="surrogateescape"))
    for row in rows[:: max(1, len(rows) // SAMPLED_FILES)]:
        total.update(read(row.path)[:SAMPLED_BYTES])
    return total.hexdigest()[:8]
