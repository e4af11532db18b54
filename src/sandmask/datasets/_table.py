"""Rows of a CSV or Parquet file as text, with their numbers."""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from sandmask.datasets._scan import ImageTree, LeftOut
from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from _csv import Reader


SUFFIXES = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Table:
    """A table on the disk. What cannot be read raises an error that names the file, and the row where there is one."""

    file: Path

    @property
    def is_parquet(self) -> bool:
        """Whether it is a Parquet file rather than text."""
        return self.file.suffix.lower() == ".parquet"

    def columns(self) -> list[str]:
        """The names of the columns; an error if two have the same, because it is not known which one is meant."""
        with _explained(self.file):
            names = self._header()
        if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
            raise SandmaskError(f"{self.file} has several columns {repeated[0]!r}. Rename all but one.")
        return names

    def _header(self) -> list[str]:
        if self.is_parquet:
            import pyarrow.parquet as pq

            with self.file.open("rb") as file:  # Arrow takes paths in UTF-8 only
                return list(pq.read_schema(file).names)
        with self.file.open(encoding="utf-8-sig", newline="") as lines:
            return [name.strip() for name in next(_csv(lines), [])]

    def need(self, columns: Sequence[str]) -> None:
        """Refuse a file that is missing, or that lacks one of these columns."""
        if not self.file.is_file():
            raise SandmaskError(f"There is no file {self.file}.")
        there = self.columns()
        if missing := [name for name in columns if name not in there]:
            raise SandmaskError(f"{self.file} has no column {missing[0]!r}. Its columns: {', '.join(there)}.")

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        """The cells of these columns row by row, and the row's number: in a CSV file its line, else counted from 1."""
        with _explained(self.file):
            yield from self._parquet_rows(columns) if self.is_parquet else self._csv_rows(columns)

    def error(self, row: int, what: str) -> SandmaskError:
        """What is wrong with a row."""
        return SandmaskError(f"{self.file}, row {row}: {what}.")

    def _parquet_rows(self, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        import pyarrow.parquet as pq

        with self.file.open("rb") as file:
            content = pq.read_table(file, columns=list(columns)).to_pydict()
        cells = zip(*(content[column] for column in columns), strict=True)
        for number, values in enumerate(cells, start=1):
            yield number, ["" if value is None else str(value).strip() for value in values]

    def _csv_rows(self, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        with self.file.open(encoding="utf-8-sig", newline="") as lines:
            reader = _csv(lines)
            header = [name.strip() for name in next(reader, [])]
            places = [header.index(column) for column in columns]
            for cells in reader:
                if len(cells) not in (0, len(header)):
                    raise self.error(reader.line_num, f"{len(cells)} cells, and the header has {len(header)}")
                if cells:
                    yield reader.line_num, [cells[place].strip() for place in places]


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """What reading a damaged file raises, in one line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise SandmaskError(f"{file} is not UTF-8 text. Save it as UTF-8.") from error
    except (OSError, ValueError, csv.Error) as error:
        if isinstance(error, SandmaskError):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise SandmaskError(f"{file} cannot be read as {file.suffix[1:].lower()}: {reason}") from error


def _csv(lines: Iterable[str]) -> "Reader":
    """A reader with the separator that the first line has most of."""
    iterator = iter(lines)
    first = next(iterator, "")

    def all_lines() -> Iterator[str]:
        yield first
        yield from iterator

    return csv.reader(all_lines(), delimiter=max(",;\t", key=first.count), strict=True)


RANDOM, IN, OUT = -1, 0, 1  # how an example is split: at random by the trial's seed, or as the row says


class Row(NamedTuple):
    """An image, its class and its domain, and whether the table says how it is split."""

    path: str  # relative to the dataset's folder
    label: str
    domain: str
    split: int = RANDOM


@dataclass(frozen=True)
class Listed:
    """The rows of a table, in the order in which examples are numbered within a domain.

    `contents` holds the images by path if they are not files; `left_out` the rows that are not used; `domains` the
    order of the domains, if the table says it.
    """

    rows: Sequence[Row]
    contents: Mapping[str, bytes] | None = None
    left_out: tuple[LeftOut, ...] = ()
    domains: tuple[str, ...] = ()


def tree_of_rows(
    root: Path,
    listed: Listed,
    name: str,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    *,
    allow_missing_classes: bool = False,
) -> ImageTree:
    """The images that a table lists. Without `domains` (or `classes`), those of the rows in alphabetical order.

    :param root: the folder that the rows' paths are relative to.
    :param listed: the rows.
    :param name: what messages call the table.
    """
    rows = listed.rows
    domains = tuple(domains) or listed.domains or tuple(sorted({row.domain for row in rows}))
    classes = tuple(classes) or tuple(sorted({row.label for row in rows}))
    _check(rows, name, domains, classes, allow_missing_classes)
    place = {domain: number for number, domain in enumerate(domains)}
    label = {each: number for number, each in enumerate(classes)}
    ordered = sorted(rows, key=lambda row: place[row.domain])  # stable: within a domain, rows stay in order
    sizes = Counter(row.domain for row in rows)
    is_split = any(row.split != RANDOM for row in rows)
    return ImageTree(
        root,
        domains,
        classes,
        tuple(row.path for row in ordered),
        torch.tensor([label[row.label] for row in ordered]),
        tuple(torch.tensor([0, *(sizes[domain] for domain in domains)]).cumsum(0).tolist()),
        listed.left_out,
        torch.tensor([row.split for row in ordered]) if is_split else None,
        listed.contents,
    )


def _check(
    rows: Sequence[Row], name: str, domains: tuple[str, ...], classes: tuple[str, ...], allow_missing_classes: bool
) -> None:
    there = {(row.domain, row.label) for row in rows}
    for what, known, found in (
        ("domain", domains, {domain for domain, _ in there}),
        ("class", classes, {label for _, label in there}),
    ):
        if unknown := sorted(found - set(known)):
            raise SandmaskError(f"{name}: unknown {what} {unknown[0]!r}. There should be: {', '.join(known)}.")
    for domain in domains:
        missing = [label for label in classes if (domain, label) not in there]
        if len(missing) == len(classes):
            raise SandmaskError(f"{name} lists no images of the domain {domain!r}.")
        if missing and not allow_missing_classes:
            more = f" (and {len(missing) - 1} more classes)" if len(missing) > 1 else ""
            raise SandmaskError(
                f"{name}: the class {missing[0]!r} is missing in the domain {domain!r}{more}. Add images of it, "
                "or accept this with --missing-classes (in Python: allow_missing_classes=True)."
            )
