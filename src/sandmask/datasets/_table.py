"""Rows of a CSV or Parquet file as text, with their numbers."""

import csv
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

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
        with self._lines() as lines:
            return _names(_csv(lines))

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
    """What reading a damaged file raises, in one line."""
    try:
        yield
    except SandmaskError:
        raise
    except UnicodeDecodeError as error:
        raise SandmaskError(f"{file} is not UTF-8 text. Save it as UTF-8.") from error
    except (OSError, ValueError, csv.Error) as error:
        reason = str(error).strip().partition("\n")[0]
        raise SandmaskError(f"{file} cannot be read as {file.suffix[1:].lower()}: {reason}") from error


def _csv(lines: TextIO) -> "Reader":
    """A reader with the separator that the first line has most of."""
    first = next(lines, "")
    return csv.reader(itertools.chain([first], lines), delimiter=max(",;\t", key=first.count), strict=True)


def _names(reader: "Reader") -> list[str]:
    return [name.strip() for name in next(reader, [])]
