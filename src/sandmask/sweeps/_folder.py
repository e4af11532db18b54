"""The folder of a sweep. "Files of a run" in docs/house.md lists all of its files."""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sandmask._files import files_below
from sandmask.algorithms import ALGORITHMS
from sandmask.datasets import dataset_entry
from sandmask.errors import SandmaskError
from sandmask.records import read_runs
from sandmask.records._archive import ARCHIVE_SUFFIX, read_statuses
from sandmask.sweeps._locks import turn
from sandmask.sweeps._spec import RESTORE, SweepSpec, read_sweep, refused_changes, write_sweep
from sandmask.training import MODELS_SUFFIX


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep."""

    path: Path

    @property
    def request(self) -> Path:
        """The file with the sweep spec."""
        return self.path / "sweep.toml"

    @property
    def work(self) -> Path:
        """The file with the estimated work of missing runs, from which the time left is computed."""
        return self.path / "work.json"

    @property
    def journal(self) -> Path:
        """The file with the studies of a search."""
        return self.path / "search.journal"

    @property
    def stacks(self) -> Path:
        """The folder with the files of stacks."""
        return self.path / "stacks"

    def records(self, stack: str) -> Path:
        """The records of a stack's finished runs."""
        return self.stacks / f"{stack}{ARCHIVE_SUFFIX}"

    def checkpoint(self, stack: str) -> Path:
        """The checkpoint of a stack, while it trains."""
        return self.stacks / f"{stack}.checkpoint.safetensors"

    def models(self, stack: str) -> Path:
        """The kept models of a stack's runs."""
        return self.stacks / f"{stack}{MODELS_SUFFIX}"

    def progress(self, stack: str) -> Path:
        """The progress file of a stack."""
        return self.stacks / f"{stack}.progress.json"

    def read_spec(self) -> SweepSpec | None:
        """The sweep in this folder; None if there is none."""
        if not self.request.exists():
            return None
        fields = read_sweep(self.request, verify=True)
        if missing := [name for name in ("datasets", "algorithms") if name not in fields]:
            raise SandmaskError(f"{self.request} has no {' and no '.join(missing)}. {RESTORE}")
        sweep = SweepSpec(**fields)
        try:
            for dataset in sweep.datasets:
                dataset_entry(dataset)
            for algorithm in sweep.algorithms:
                ALGORITHMS[algorithm]
        except SandmaskError as error:
            raise SandmaskError(
                f"{self.request}: {error} If it is your own, name its file again: --plugin FILE"
            ) from None
        return sweep

    def accept(self, sweep: SweepSpec) -> None:
        """Write the sweep spec, if the folder is new or if it extends the sweep in it; any other change is an error."""
        try:
            os.fsencode(self.path).decode("utf-8")
        except UnicodeDecodeError:
            raise SandmaskError(
                f"{self.path} is not valid UTF-8, and checkpoints there could not be read. Rename it."
            ) from None
        self.stacks.mkdir(parents=True, exist_ok=True)
        with turn(self.stacks):  # two programs may extend the sweep at the same time
            old = self.read_spec()
            if old is not None and (reasons := refused_changes(old, sweep)):
                raise SandmaskError(
                    f"{self.path} holds another sweep: {'; '.join(reasons)}. Request at least the same runs "
                    "(more draws, trials, algorithms, datasets or environments extend it; --only trains some of them), "
                    "or choose another folder."
                )
            if old != sweep:
                write_sweep(sweep, self.request)

    def finished(self) -> set[str]:
        """The ids of all finished runs in any file below the folder."""
        found: set[str] = set()
        for file in files_below(self.path, ARCHIVE_SUFFIX, ".jsonl"):
            with suppress(FileNotFoundError):  # removed since it was listed
                found |= _finished_runs(file, stamp_of(file))
        return found


@cache
def _finished_runs(file: Path, stamp: tuple[int, int]) -> frozenset[str]:  # noqa: ARG001 - read again when it changes
    if file.suffix == ".jsonl":
        statuses = {run.spec.id: run.status for run in read_runs(file)}
    else:
        statuses = read_statuses(file)
    return frozenset(run for run, status in statuses.items() if status != "running")


def stamp_of(file: Path) -> tuple[int, int]:
    """The time of modification and the size of a file. If they are the same, the file has not changed."""
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size
