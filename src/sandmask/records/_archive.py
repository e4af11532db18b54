"""Archives: many runs in one compressed Parquet file, with one row per run and without loss."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandmask._files import opened_parquet, replacing
from sandmask.errors import SandmaskError
from sandmask.records._checks import check_record
from sandmask.records._checksums import CHECKSUMS_KEY, Checksums, is_numbers
from sandmask.records._lines import check_schema
from sandmask.records._measures import SPLITS, table_size
from sandmask.records._types import SCHEMA_VERSION, RunRecord, RunSpec, Sizes, Status, under_prefix

ARCHIVE_SUFFIX = ".records.parquet"
_VERSION_KEY = b"sandmask.schema"
_METRIC, _TABLE = "metric.", "table."
_RUNS_PER_GROUP = 512
_WORDS = ("run", "spec", "env_names", "classes", "status", "diverged_at")


def write_archive(runs: Sequence[RunRecord], path: str | os.PathLike[str]) -> None:
    """Write runs to one file, which `read_runs` finds in a folder.

    The file is complete or absent, even if the process is killed.

    :param runs: records of the runs.
    :param path: file name that ends in `.records.parquet`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = Path(path)
    if not target.name.endswith(ARCHIVE_SUFFIX):
        raise SandmaskError(f"An archive's name should end in {ARCHIVE_SUFFIX!r}. Found {target.name!r}.")
    for run in runs:
        try:
            check_record(run)
        except ValueError as error:
            raise SandmaskError(f"{target} cannot be written: {error}.") from error
    schema = _schema(runs)
    checksums = Checksums(schema)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Durable, because callers then remove checkpoints of the runs. Opened here, because Arrow needs UTF-8 paths.
    with (
        replacing(target, durable=True) as temporary,
        temporary.open("wb") as file,
        pq.ParquetWriter(file, schema, **_layout(schema)) as writer,
    ):
        for begin in range(0, len(runs), _RUNS_PER_GROUP):
            rows = [_row(run) for run in runs[begin : begin + _RUNS_PER_GROUP]]
            table = pa.Table.from_pylist(rows, schema=schema)
            checksums.update(table)
            writer.write_table(table)
        writer.add_key_value_metadata({CHECKSUMS_KEY: checksums.to_json()})


def _schema(runs: Sequence[RunRecord]) -> Any:
    import pyarrow as pa

    fields: list[tuple[str, Any]] = [
        ("run", pa.string()),
        ("spec", pa.string()),
        ("env_names", pa.list_(pa.string())),
        ("classes", pa.list_(pa.string())),
        ("status", pa.string()),
        ("diverged_at", pa.int64()),
        ("steps", pa.list_(pa.int64())),
    ]
    for split in SPLITS:
        fields += [
            (f"{split}_sizes", pa.list_(pa.int32())),  # null if unknown; accuracies are then stored raw
            (f"{split}_counts", pa.list_(pa.int32())),
            (f"{split}_raw", pa.list_(pa.float64())),
        ]
    for name in sorted({name for run in runs for name in run.metrics}):
        number = pa.float32() if _is_single(runs, name) else pa.float64()
        fields.append((f"{_METRIC}{name}", pa.list_(number)))
    tables = sorted({name for run in runs for name in run.tables})
    fields += [(f"{_TABLE}{name}", pa.list_(pa.int32())) for name in tables]
    return pa.schema(fields, metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()})


def _layout(schema: Any) -> dict[str, Any]:
    """Compression settings: byte-stream split for numbers, dictionaries for the rest."""
    import pyarrow as pa

    split, repeating = {}, []
    for field in schema:
        is_list = pa.types.is_list(field.type)
        column = f"{field.name}.list.element" if is_list else field.name
        if field.name.endswith(("_counts", "_raw")) or field.name.startswith((_METRIC, _TABLE)):
            split[column] = "BYTE_STREAM_SPLIT"
        else:
            repeating.append(column)
    return {
        "compression": "zstd",
        "compression_level": 9,
        "use_dictionary": repeating,
        "column_encoding": split,
        "data_page_size": 8 << 20,
        "write_page_checksum": True,
    }


def _is_single(runs: Sequence[RunRecord], metric: str) -> bool:
    """Whether single precision stores all values of a metric without loss."""
    curves = [run.metrics[metric] for run in runs if metric in run.metrics]
    with np.errstate(over="ignore"):
        return all(np.array_equal(curve, curve.astype(np.float32), equal_nan=True) for curve in curves)


def _row(run: RunRecord) -> dict[str, Any]:
    """Return the row of a run. Missing columns become null, and columns that the schema lacks are left out.

    If the sizes of the splits are known, accuracies are stored as counts, which are exact and small.
    """
    row: dict[str, Any] = {
        "run": run.spec.id,
        "spec": json.dumps(run.spec.to_json()),
        "env_names": run.env_names,
        "classes": run.classes,
        "status": run.status,
        "diverged_at": run.diverged_at,
        "steps": run.steps,
    }
    accuracies = (run.accuracy_in, run.accuracy_out)
    for split, accuracy, sizes in zip(SPLITS, accuracies, run.sizes or (None, None), strict=True):
        if sizes is None:
            row[f"{split}_raw"] = accuracy.ravel()
        else:
            row[f"{split}_sizes"] = sizes
            row[f"{split}_counts"] = pack_counts(np.rint(accuracy * sizes))
    row |= {f"{_METRIC}{name}": curve for name, curve in run.metrics.items()}
    if len(run.steps):
        row |= {f"{_TABLE}{name}": pack_counts(table) for name, table in run.tables.items()}
    return row


def read_archive(path: Path) -> list[RunRecord]:
    """Read the runs of an archive in the order in which they were written."""
    with _opened(path) as file:
        groups = (file.read_row_group(group, use_threads=False) for group in range(file.num_row_groups))
        stored, checksums, runs = _stored_checksums(file), Checksums(file.schema_arrow), []
        for group in groups:
            if stored is not None:
                checksums.update(group)
            runs += [run for batch in group.to_batches() for run in _runs(batch)]
        if stored is not None:
            checksums.check(stored)
        return runs


def read_statuses(path: Path) -> dict[str, Status]:
    """Read the status of each run by its id, without the curves, which are most of the file."""
    with _opened(path) as file:
        table = file.read(["run", "status"], use_threads=False)
        if (stored := _stored_checksums(file)) is not None:
            checksums = Checksums(table.schema)
            checksums.update(table)
            checksums.check(stored, all_columns=False)
        return dict(zip(table["run"].to_pylist(), table["status"].to_pylist(), strict=True))


def _stored_checksums(file: Any) -> bytes | None:
    """Return the checksums in the file; older archives have none."""
    stored: bytes | None = (file.metadata.metadata or {}).get(CHECKSUMS_KEY)
    return stored


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a Parquet file. Errors in it become a `SandmaskError` of one line."""
    import pyarrow as pa

    try:
        with opened_parquet(path, page_checksum_verification=True) as file:
            version = (file.schema_arrow.metadata or {}).get(_VERSION_KEY)
            if version is None:
                raise SandmaskError("it is not an archive of records, though it is named like one.")
            check_schema(int(version))
            yield file
    except FileNotFoundError:
        raise
    except SandmaskError as error:
        raise SandmaskError(f"{path} cannot be read: {error}") from error
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno:  # an error of the system; the file may be intact
            raise SandmaskError(f"{path} cannot be read: {error.strerror}.") from error
        said = " ".join(str(error).split()).rstrip(" .")
        raise SandmaskError(f"{path} cannot be read: {said}. Restore it, or remove it.") from error


def _runs(batch: Any) -> Iterator[RunRecord]:
    """Yield the runs of some rows. Equal names and steps share one object, and metrics are views of a few large arrays.

    This is faster than one array per run, and the memory can be returned to the system.
    """
    words = {name: batch.column(name).to_pylist() for name in _WORDS}
    lists = {name: _lists(batch.column(name)) for name in batch.schema.names if name not in _WORDS}
    shared: dict[Any, Any] = {}
    for row in range(batch.num_rows):
        present = {name: values for name, column in lists.items() if (values := column[row]) is not None}
        names, classes, sizes = tuple(words["env_names"][row]), tuple(words["classes"][row]), _sizes(present)
        steps = np.array(present["steps"], dtype=np.int64)
        steps.flags.writeable = False
        run = RunRecord(
            spec=RunSpec.from_json(json.loads(words["spec"][row])),
            env_names=shared.setdefault(names, names),
            steps=shared.setdefault(steps.tobytes(), steps),
            accuracy_in=_accuracies(present, "in", len(names)),
            accuracy_out=_accuracies(present, "out", len(names)),
            metrics=under_prefix(_METRIC, present),
            status=words["status"][row],
            diverged_at=words["diverged_at"][row],
            classes=shared.setdefault(classes, classes),
            sizes=shared.setdefault(sizes, sizes),
            tables={
                name: unpack_counts(counts, table_size(name, len(names), len(classes)))
                for name, counts in under_prefix(_TABLE, present).items()
            },
        )
        if words["run"][row] != run.spec.id:
            raise ValueError(f"the id {words['run'][row]!r} does not belong to its spec, whose id is {run.spec.id!r}")
        check_record(run)
        yield run


def _lists(column: Any) -> list[NDArray[Any] | None]:
    """Return the lists of numbers in a column as views of one array; None for null. Floats are writable doubles.

    This uses DLPack, because `to_numpy` imports pandas, which takes longer than everything else.
    """
    if not is_numbers(column.type):
        raise ValueError(f"a column should have lists of numbers, not {column.type}")
    values, offsets = np.from_dlpack(column.values), np.from_dlpack(column.offsets)
    if values.dtype.kind == "f":
        values = values.astype(np.float64)
    return [
        values[begin:end] if is_valid else None
        for (begin, end), is_valid in zip(pairwise(offsets), column.is_valid().to_pylist(), strict=True)
    ]


def _sizes(present: dict[str, NDArray[Any]]) -> Sizes | None:
    inside, outside = (present.get(f"{split}_sizes") for split in SPLITS)
    return None if inside is None or outside is None else (tuple(inside.tolist()), tuple(outside.tolist()))


def _accuracies(present: dict[str, NDArray[Any]], split: str, environments: int) -> NDArray[np.float64]:
    if f"{split}_sizes" not in present:
        return present[f"{split}_raw"].reshape(-1, environments).copy()
    sizes, counts = present[f"{split}_sizes"], present[f"{split}_counts"]
    if len(sizes) != environments or not (sizes > 0).all():
        raise ValueError(f"sizes of splits should be positive, one for each of {environments} environments")
    accuracy: NDArray[np.float64] = unpack_counts(counts, environments) / sizes
    return accuracy


def pack_counts(counts: NDArray[Any]) -> NDArray[np.int32]:
    """Encode counts [T, numbers] as changes over T, one number after the other.

    Changes are small and many are zero. Mapping 0, -1, 1, -2, 2, ... to 0, 1, 2, 3, 4, ... keeps their upper bytes
    zero, which compresses well.
    """
    changes = np.diff(counts.astype(np.int32).T, axis=1, prepend=np.int32(0))
    folded: NDArray[np.int32] = (changes << 1) ^ (changes >> 31)
    return folded.ravel()


def unpack_counts(packed: NDArray[np.int32], numbers: int) -> NDArray[np.int64]:
    """The inverse of `pack_counts`."""
    changes = (packed >> 1) ^ -(packed & 1)
    counts: NDArray[np.int64] = np.cumsum(changes.reshape(numbers, -1), axis=1, dtype=np.int64)
    return np.ascontiguousarray(counts.T)
