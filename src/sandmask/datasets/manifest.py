"""A user's own images, listed in a CSV or Parquet file with one row per image: path, class and domain.

    path,class,domain,split
    scans/0001.png,benign,north,train
    scans/0002.png,malignant,south,val

The column `split` is optional. If columns have other names, these follow the file's name:
`scans.csv:class=diagnosis:domain=site`.
"""

import csv
import itertools
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from sandmask._files import opened_parquet
from sandmask._text import first_line
from sandmask.datasets._base import DatasetEntry
from sandmask.datasets._scan import LeftOut
from sandmask.datasets._tree import IN, OUT, RANDOM, Listed, Row
from sandmask.datasets.image_sets import content_id, own_entry
from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from _csv import Reader

SUFFIXES = (".csv", ".tsv", ".parquet")
COLUMNS = ("path", "class", "domain", "split")
OPTIONS = (*COLUMNS, "root")
SPLITS = {"": RANDOM, "train": IN, "in": IN, "val": OUT, "valid": OUT, "validation": OUT, "out": OUT}
SPLIT_NAMES = {RANDOM: "empty", IN: "train", OUT: "val"}
NEEDED = "A manifest has a row for each image, with the columns path, class and domain."

Facts = tuple[str, str, int]  # class, domain and split of an image


@dataclass(frozen=True)
class Table:
    """A CSV or Parquet file. Errors name the file, and the row if there is one."""

    file: Path

    @property
    def is_parquet(self) -> bool:
        """Whether it is a Parquet file rather than text."""
        return self.file.suffix.lower() == ".parquet"

    def columns(self) -> list[str]:
        """Return the names of the columns. Raise an error if two columns have the same name."""
        with _explained(self.file):
            names = self._header()
        if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
            raise SandmaskError(f"{self.file} has several columns {repeated[0]!r}. Rename all but one.")
        return names

    def _header(self) -> list[str]:
        if self.is_parquet:
            with opened_parquet(self.file) as file:
                return list(file.schema_arrow.names)
        with self._lines() as lines:
            return _names(_csv(lines))

    def need(self, columns: Sequence[str]) -> None:
        """Raise an error if the file or one of these columns is missing."""
        if not self.file.is_file():
            raise SandmaskError(f"There is no file {self.file}.")
        there = self.columns()
        if missing := [name for name in columns if name not in there]:
            raise SandmaskError(f"{self.file} has no column {missing[0]!r}. Its columns: {', '.join(there)}.")

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of each row (its line in a CSV file, otherwise from 1) and its cells in these columns."""
        with _explained(self.file):
            yield from self._parquet_rows(columns) if self.is_parquet else self._csv_rows(columns)

    def error(self, row: int, what: str) -> SandmaskError:
        """Return an error about a row."""
        return SandmaskError(f"{self.file}, row {row}: {what}.")

    def _parquet_rows(self, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        with opened_parquet(self.file) as file:
            content = file.read(list(columns), use_threads=False).to_pydict()
        cells = zip(*(content[column] for column in columns), strict=True)
        for number, values in enumerate(cells, start=1):
            yield number, ["" if value is None else str(value).strip() for value in values]

    def _csv_rows(self, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        with self._lines() as lines:
            reader = _csv(lines)
            header = _names(reader)
            places = [header.index(column) for column in columns]
            for cells in reader:
                if len(cells) not in (0, len(header)):
                    raise self.error(reader.line_num, f"{len(cells)} cells, and the header has {len(header)}")
                if cells:
                    yield reader.line_num, [cells[place].strip() for place in places]

    def _lines(self) -> TextIO:
        return self.file.open(encoding="utf-8-sig", newline="")


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Raise errors of a damaged file as an error with a message of one line."""
    try:
        yield
    except SandmaskError:
        raise
    except UnicodeDecodeError as error:
        raise SandmaskError(f"{file} is not UTF-8 text. Save it as UTF-8.") from error
    except (OSError, ValueError, csv.Error) as error:
        raise SandmaskError(f"{file} cannot be read as {file.suffix[1:].lower()}: {first_line(error)}") from error


def _csv(lines: TextIO) -> "Reader":
    """Return a CSV reader whose separator is the most frequent one in the first line."""
    first = next(lines, "")
    return csv.reader(itertools.chain([first], lines), delimiter=max(",;\t", key=first.count), strict=True)


def _names(reader: "Reader") -> list[str]:
    return [name.strip() for name in next(reader, [])]


def recognizes(source: str) -> bool:
    """Whether this is the path of a table, and not of a folder."""
    return source.lower().endswith(SUFFIXES) and not os.path.isdir(source)  # noqa: PTH112 - never raises


def absolute(source: str) -> str:
    """Return the absolute path of a file."""
    return os.path.abspath(Path(source).expanduser())  # noqa: PTH100 - a link stays one


def entry_of(source: str, options: Mapping[str, str]) -> DatasetEntry:
    """Return a registry entry for the images that a table lists.

    The name of the entry is the name of the file and a hash of the rows and the images, such as `scans-3f2a9c51`.

    :param source: path of a CSV, TSV or Parquet file.
    :param options: names of the columns in the table, such as {"class": "diagnosis"}, and `root`, the folder that paths
        are relative to, if it is not the folder of the table.
    """
    file = Path(source)
    images, left_out = _Manifest.of(file, options).images()
    root = Path(os.path.commonpath([path.parent for path in images]))
    rows = sorted(
        (Row(path.relative_to(root).as_posix(), *facts) for path, facts in images.items()),
        key=lambda row: (row.domain, row.label, row.path),
    )
    check_splits(file, ((row.domain, row.split) for row in rows))
    text = "".join(f"{unicodedata.normalize('NFC', str(part))}\0" for row in rows for part in row)
    number = content_id(root, [row.path for row in rows], text.encode(errors="surrogateescape"))
    domains = tuple(sorted({row.domain for row in rows}))
    listed = Listed(rows, left_out=left_out)
    return own_entry(file.stem, number, domains, description="A manifest of images", root=root, table=lambda _: listed)


def listed_files(file: Path) -> list[Path]:
    """Return the files in the column `path` of a table, in the order of the rows; none if it has no such column."""
    manifest = _Manifest.of(file, {})
    if "path" not in manifest.table.columns():
        return []
    return [manifest.located(number, path) for number, (path,) in manifest.table.rows(["path"])]


@dataclass(frozen=True)
class _Manifest:
    table: Table
    names: dict[str, str]  # names of the columns in the table
    root: Path  # the folder that paths are relative to

    @classmethod
    def of(cls, file: Path, options: Mapping[str, str]) -> "_Manifest":
        file = file.expanduser()
        if not file.is_file():
            raise SandmaskError(f"There is no file {file}. {NEEDED}")
        names = {name: options.get(name, name) for name in COLUMNS}
        return cls(Table(file), names, file.parent / options.get("root", ""))

    def images(self) -> tuple[dict[Path, Facts], tuple[LeftOut, ...]]:
        """Return the checked facts of each file, and the rows that repeat a file."""
        found: dict[Path, Facts] = {}
        repeated: list[LeftOut] = []
        first: dict[str, tuple[int, Facts]] = {}  # by real path: the first row with this file
        for number, (path, *cells) in self.table.rows(self._columns()):
            file, facts = self.located(number, path), self._facts(number, *cells)
            if not file.is_file():
                hint = "; write / instead of \\" if "\\" in path and os.sep != "\\" else ""
                what = "is not a file" if file.exists() else "does not exist"
                raise self.table.error(number, f"{file} {what}{hint}")
            earlier, earlier_facts = first.setdefault(os.path.realpath(file), (number, facts))
            if earlier_facts != facts:
                raise self.table.error(number, f"{path} is in row {earlier} with another class, domain or split")
            if earlier == number:
                found[Path(os.path.abspath(file))] = facts  # noqa: PTH100 - a link stays one
            else:
                repeated.append(LeftOut(path, "listed more than once"))
        if not found:
            raise SandmaskError(f"{self.table.file} lists no images. {NEEDED}")
        return found, tuple(repeated)

    def located(self, number: int, path: str) -> Path:
        """Return the file of a row."""
        if not path:
            raise self.table.error(number, f"no {self.names['path']}")
        return self.root / path

    def _columns(self) -> list[str]:
        """Return the names of the columns in the table. Raise an error if a required one is missing."""
        there = self.table.columns()
        for name, own in self.names.items():
            if own not in there and (name != "split" or own != name):
                file, found = self.table.file, ", ".join(there) or "none"
                raise SandmaskError(
                    f"{file} has no column {own!r}. Its columns: {found}. {NEEDED} If the column has another name, say "
                    f"so: {file.name}:{name}=NAME"
                )
        return [own for own in self.names.values() if own in there]

    def _facts(self, number: int, label: str, domain: str, split: str = "") -> Facts:
        """Check the cells of a row and return its facts."""
        for name, cell in (("class", label), ("domain", domain)):
            if not cell:
                raise self.table.error(number, f"no {self.names[name]}")
        if split.lower() not in SPLITS:
            raise self.table.error(
                number,
                f"{self.names['split']} should be train, val or empty. Found {split!r}. For a held-out domain, tables "
                "report the accuracy on the train rows",
            )
        # Unicode has several encodings of the same letters.
        label, domain = (unicodedata.normalize("NFC", cell) for cell in (label, domain))
        return label, domain, SPLITS[split.lower()]


def check_splits(file: Path, rows: Iterable[tuple[str, int]]) -> None:
    """Raise an error unless each domain has both splits, or an empty split in all of its rows."""
    found: dict[str, set[int]] = {}
    for domain, split in rows:
        found.setdefault(domain, set()).add(split)
    for domain, splits in found.items():
        if splits not in ({RANDOM}, {IN, OUT}):
            spelled = " and ".join(SPLIT_NAMES[split] for split in sorted(splits))
            raise SandmaskError(
                f"{file}: all rows of the domain {domain!r} have the split {spelled}. A domain should have rows of "
                "both train and val, or an empty split in all of its rows, with which it is split at random, 80 to 20."
            )
