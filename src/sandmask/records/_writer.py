"""The writer of a record file. Only one process at a time can write to a file."""

import json
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any, Literal, Self

from sandmask._files import lock, naming, replacing, sync
from sandmask.errors import SandmaskError
from sandmask.records._checks import check_names, check_run
from sandmask.records._lines import RunState, encoded, eval_line, read_lines, run_line
from sandmask.records._types import RunRecord, RunSpec, Sizes, Status


def open_locked(path: Path) -> FileIO:
    """Open `path` for reading and appending, create it if needed, and lock it. Raise an error if it is locked."""
    while True:
        file = FileIO(path, "a+")
        if not lock(file):
            file.close()
            raise SandmaskError(
                f"{path} is being written by another process. A record file has one writer: "
                "wait until that process ends, or write to another folder."
            )
        # Between opening and locking, the previous writer may have replaced the file (see `rewind`).
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


_open: "weakref.WeakSet[RecordWriter]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close all writers, because a forked worker must not keep the lock of a parent that died."""
    for writer in list(_open):
        writer.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class RecordWriter:
    """Append runs and their evaluations to a file, one line each. Several runs can be written at the same time.

    An existing file is continued: an incomplete last line is removed, and the runs in the file can be continued. A
    second writer on the same file raises an error. Every written line survives a crash of the process; lines before a
    `commit` also survive a power failure.

    :param path: the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_locked(self.path)
        self._entry_is_new = True
        _open.add(self)
        try:
            self._cut_torn_line()
            self._runs = self._scan()
        except BaseException:
            self.close()
            raise

    def start(
        self, spec: RunSpec, env_names: Sequence[str], classes: Sequence[str] = (), sizes: Sizes | None = None
    ) -> str:
        """Begin a run, or continue it if the file already contains it, and return its id.

        :param sizes: numbers of examples in the "in" and "out" splits of the environments, if accuracies are counts
            divided by these.
        """
        if spec.id not in self._runs:
            try:
                check_run(spec.id, spec, env_names, classes, sizes)
            except ValueError as error:
                raise SandmaskError(f"Run {spec.id} cannot be written to {self.path}: {error}.") from error
            run = RunState(len(env_names), len(classes), sizes)
            self._write(run, run_line(spec, env_names, classes, sizes))
            self._runs[spec.id] = run
        elif sizes is not None and self._runs[spec.id].sizes not in (None, sizes):
            raise SandmaskError(
                f"{self.path} contains run {spec.id} with splits of other sizes, so the data or --train-eval-limit has "
                "changed since the run began. Undo this change, or train the run in another folder."
            )
        return spec.id

    def evaluation(
        self,
        run_id: str,
        step: int,
        accuracy_in: Sequence[float],
        accuracy_out: Sequence[float],
        metrics: Mapping[str, float] | None = None,
        tables: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Append an evaluation: accuracies in 0..1 on every environment's "in" and "out" split.

        :param metrics: numbers by name.
        :param tables: counts for each class by name: see `RunRecord.tables`.
        """
        run = self._running(run_id)
        if run.last_step is not None and step <= run.last_step:
            raise SandmaskError(
                f"{self.path}: run {run_id} already has step {run.last_step}, so step {step} cannot follow. "
                "Call `rewind` before resuming from an older checkpoint."
            )
        run.check_accuracies(list(map(float, accuracy_in)), list(map(float, accuracy_out)))
        metrics, tables = metrics or {}, tables or {}
        check_names("metric", metrics)
        check_names("table", tables)
        self._write(run, eval_line(run_id, step, accuracy_in, accuracy_out, metrics, tables))
        run.last_step = step

    def end(self, run_id: str, status: Literal["done", "diverged", "pruned"], step: int) -> None:
        """End a run that is done, that diverged at `step`, or that a search pruned."""
        run = self._running(run_id)
        self._write(run, {"kind": "end", "run": run_id, "status": status, "step": step})
        run.status = status

    def commit(self) -> None:
        """Wait until everything written so far is on the disk."""
        with naming(self.path):
            os.fsync(self._file.fileno())
        if self._entry_is_new:
            sync(self.path.parent)
            self._entry_is_new = False

    def last_step(self, run_id: str) -> int | None:
        """Return the step of the run's last evaluation in the file; None if there is none."""
        return self._runs[run_id].last_step if run_id in self._runs else None

    def status(self, run_id: str) -> Status | None:
        """Return the run's status in the file; None if the file does not contain the run."""
        return self._runs[run_id].status if run_id in self._runs else None

    def rewind(self, run_id: str | Iterable[str], step: int) -> None:
        """Remove everything that one or several runs recorded after `step`, including their ends.

        Call it before a run resumes from a checkpoint that is older than its last line. The file is replaced
        atomically and stays locked. Runs that the file does not contain are ignored.
        """
        wanted = {run_id} if isinstance(run_id, str) else set(run_id)
        names = {
            name
            for name, run in self._runs.items()
            if name in wanted and (run.status != "running" or (run.last_step is not None and run.last_step > step))
        }
        if not names:
            return
        with ExitStack() as undo, replacing(self.path, durable=True) as temporary:
            replacement = undo.enter_context(FileIO(temporary, "w+"))
            lock(replacement)
            with self.path.open("rb") as lines:
                for raw in lines:
                    if not _is_after(json.loads(raw), names, step):
                        _write_all(replacement, raw)
            undo.pop_all()
        self._file.close()
        self._file = replacement
        self._file.seek(0, os.SEEK_END)
        self._entry_is_new = True
        self._runs = self._scan()

    def close(self) -> None:
        """Release the file and its lock."""
        _open.discard(self)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            self.commit()
        self.close()

    def _running(self, run_id: str) -> RunState:
        run = self._runs.get(run_id)
        if run is None:
            raise SandmaskError(f"{self.path} has no run {run_id}. Call `start` with its spec first.")
        if run.status != "running":
            raise SandmaskError(f"{self.path}: run {run_id} has ended ({run.status}). Call `rewind` to continue it.")
        return run

    def _write(self, run: RunState, line: dict[str, Any]) -> None:
        written, crc = encoded(line, run.crc)
        with naming(self.path):
            _write_all(self._file, written)
        run.crc, run.has_crc = crc, True

    def _cut_torn_line(self) -> None:
        """Remove an incomplete last line, which has no newline."""
        with self.path.open("rb") as file:
            complete = sum(len(line) for line in file if line.endswith(b"\n"))
        if complete < self.path.stat().st_size:
            self._file.truncate(complete)

    def _scan(self) -> dict[str, RunState]:
        runs: dict[str, RunState] = {}
        for _ in read_lines(self.path, runs):
            pass
        return runs


def write_record(record: RunRecord, path: Path) -> None:
    """Write a record to a file of its own. The file is complete or absent, even if the process is killed.

    :param record: the record.
    :param path: the file, which is replaced.
    """
    with replacing(path, durable=True) as temporary, RecordWriter(temporary) as writer:
        run = writer.start(record.spec, record.env_names, record.classes, record.sizes)
        for row, step in enumerate(record.steps.tolist()):
            metrics = {name: float(curve[row]) for name, curve in record.metrics.items()}
            tables = {name: counts[row].tolist() for name, counts in record.tables.items()}
            inside, outside = record.accuracy_in[row].tolist(), record.accuracy_out[row].tolist()
            writer.evaluation(run, step, inside, outside, metrics, tables)
        if record.status != "running":
            writer.end(run, record.status, int(record.steps[-1]) if record.diverged_at is None else record.diverged_at)


def _is_after(line: dict[str, Any], names: set[str], step: int) -> bool:
    if line["run"] not in names:
        return False
    return line["kind"] == "end" or (line["kind"] == "eval" and int(line["step"]) > step)


def _write_all(file: FileIO, data: bytes) -> None:
    # An unbuffered write may be partial (full disk, signal), so the rest is written until it succeeds or fails.
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]
