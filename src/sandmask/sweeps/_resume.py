"""Stacks that an earlier, interrupted run left half-trained."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sandmask._files import remove_abandoned
from sandmask.records import RunSpec
from sandmask.sweeps._folder import SweepFolder
from sandmask.sweeps._stacks import Cap, PlannedStack, capped, stack_id
from sandmask.training import split_checkpoint
from sandmask.training.checkpoint import DamagedFileError, load_metadata

STOPPED_SECONDS = 3600.0  # after which a request to stop is forgotten, where its program was killed


def unfinished_stacks(
    folder: SweepFolder, missing: Sequence[RunSpec], finished: set[str], cap: Cap, *, idle: bool = False
) -> list[PlannedStack]:
    """The stacks with checkpoints in the folder and missing runs.

    They go on as they were; in parts where `cap` is smaller now, and without the runs that are finished. A checkpoint
    that overlaps a larger one (a split was cut short) is removed: the larger one is as far. One that holds other runs
    is left alone: it is of a stack under way, or was asked for once. Only metadata are read: tensors are checked by the
    job that resumes. Call it while holding the folder's turn.

    :param idle: no process trains in the folder, so damaged checkpoints are removed.
    """
    specs = {run.id: run for run in missing}
    found: list[PlannedStack] = []
    taken: set[str] = set()
    for path, ids in sorted(_checkpoints(folder, idle=idle), key=lambda item: (-len(item[1]), item[1])):
        wanted = [specs[run] for run in ids if run in specs and run not in taken]
        if not set(ids) <= (finished | specs.keys()):
            continue
        parts = capped(wanted, cap) if wanted else []
        split_or_remove(folder, path, parts)
        taken.update(ids)
        found += [PlannedStack(part) for part in parts]
    return found


def remove_leftovers(folder: SweepFolder) -> None:
    """Remove files of killed processes. Call it under the lock, when no process trains."""
    remove_abandoned(folder.path)
    for pattern in (".*.tmp", "*.lock", "*.stop"):
        for path in folder.stacks.glob(pattern):
            with suppress(FileNotFoundError):  # its program removed it
                if pattern != "*.stop" or time.time() - path.stat().st_mtime > STOPPED_SECONDS:
                    path.unlink()


def _checkpoints(folder: SweepFolder, *, idle: bool) -> list[tuple[Path, tuple[str, ...]]]:
    """Each checkpoint and its runs. Damaged ones are removed where the folder is idle: their stacks start over."""
    found = []
    for path in folder.stacks.glob("[!.]*.checkpoint.safetensors"):
        try:
            found.append((path, tuple(load_metadata(path)["runs"])))
        except (DamagedFileError, KeyError):
            if idle:
                path.unlink(missing_ok=True)
    return found


def split_or_remove(folder: SweepFolder, checkpoint: Path, parts: Sequence[Sequence[RunSpec]]) -> None:
    """Like `split_into`; a damaged checkpoint is removed, and its runs start over. Its runs must be claimed by nobody
    else.
    """
    try:
        split_into(folder, checkpoint, parts)
    except DamagedFileError:
        checkpoint.unlink(missing_ok=True)


def split_into(folder: SweepFolder, checkpoint: Path, parts: Sequence[Sequence[RunSpec]]) -> None:
    """Replace the checkpoint of a half-trained stack by one checkpoint per part."""
    targets = [(part, folder.checkpoint(stack_id(spec.id for spec in part))) for part in parts]
    if [path for _, path in targets] == [checkpoint]:
        return
    split_checkpoint(checkpoint, targets)
    checkpoint.unlink()
