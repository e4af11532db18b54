"""Checksums of an archive's columns. Parquet checks its pages, but not the footer that describes them."""

import json
import zlib
from typing import Any

import numpy as np

CHECKSUMS_KEY = b"sandmask.checksums"


class Checksums:
    """A CRC32 of each column's name, type, nulls and values, computed from one table after another.

    It does not depend on how rows are divided into tables, and a table has the same checksums before it is written and
    after it is read.
    """

    def __init__(self, schema: Any) -> None:
        self._kinds = {field.name: _kind(field.type) for field in schema}
        self._shapes, self._values = dict.fromkeys(self._kinds, 0), dict.fromkeys(self._kinds, 0)

    def update(self, table: Any) -> None:
        """Add the rows of a table or of a record batch."""
        for name in table.schema.names:
            column = table.column(name)
            for chunk in getattr(column, "chunks", [column]):
                self._add(name, chunk)

    def _add(self, name: str, chunk: Any) -> None:
        shapes, values = _content(chunk)
        self._shapes[name] = zlib.crc32(shapes, self._shapes[name])
        self._values[name] = zlib.crc32(values, self._values[name])

    def to_json(self) -> bytes:
        """Encode the checksums by column, as they are stored in the file."""
        return json.dumps(self._found()).encode()

    def check(self, stored: bytes, *, all_columns: bool = True) -> None:
        """Raise `ValueError` if these are not the stored checksums.

        :param stored: the result of `to_json` when the file was written.
        :param all_columns: whether all columns of the file were read.
        """
        known, found = dict(json.loads(stored)), self._found()
        names = {*known, *found} if all_columns else set(found)
        wrong = sorted(name for name in names if known.get(name) != found.get(name))
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise ValueError(f"it is damaged: the checksum of its column {wrong[0]!r}{more} does not match")

    def _found(self) -> dict[str, int]:
        return {
            name: zlib.crc32(f"{name} {kind} {self._shapes[name]} {self._values[name]}".encode())
            for name, kind in self._kinds.items()
        }


def is_numbers(type_: Any) -> bool:
    """Whether a column has lists of numbers."""
    import pyarrow as pa

    if not pa.types.is_list(type_):
        return False
    return bool(pa.types.is_integer(type_.value_type) or pa.types.is_floating(type_.value_type))


def _kind(type_: Any) -> str:
    """Return the type of a column's values. Versions of Arrow spell nested types differently."""
    import pyarrow as pa

    return f"list of {type_.value_type}" if pa.types.is_list(type_) else str(type_)


def _content(chunk: Any) -> tuple[Any, Any]:
    """Return the lengths of a chunk's lists (-1 for null) and their numbers; for other values, b"" and their JSON."""
    if not is_numbers(chunk.type):
        return b"", (json.dumps(chunk.to_pylist(), separators=(",", ":"))[1:-1] + ",").encode() if len(chunk) else b""
    lengths = np.diff(np.from_dlpack(chunk.offsets))  # NumPy, because numeric functions of Arrow import pandas
    lengths[~np.array(chunk.is_valid().to_pylist(), dtype=bool)] = -1
    return lengths, np.ascontiguousarray(np.from_dlpack(chunk.flatten()))
