"""Stacks that an earlier, interrupted run left half-trained."""

from collections.abc import Sequence
from pathlib import Path

from sandmask.errors import SandmaskError
from sandmask.records import RunSpec
from sandmask.sweeps._folder import SweepFolder
from sandmask.sweeps._stacks import Cap, PlannedStack, equal_parts, stack_id
from sandmask.training import split_checkpoint
from sandmask.training.checkpoint import load_checked


def unfinished_stacks(
    folder: SweepFolder, missing: Sequence[RunSpec], finished: set[str], cap: Cap
) -> list[PlannedStack]:
    """The stacks whose checkpoints are in the folder, as far as their runs are missing.

    They go on as they were; in parts where `cap` is smaller now, and without the runs that are finished. A checkpoint
    that overlaps a larger one (a split was cut short) is removed: the larger one is as far. One that holds other runs
    is left alone: it is of a stack under way, or was asked for once. Call it while holding the folder's turn.
    """
    specs = {run.id: run for run in missing}
    found: list[PlannedStack] = []
    taken: set[str] = set()
    for path, ids in sorted(_checkpoints(folder), key=lambda item: (-len(item[1]), item[1])):
        wanted = [specs[run] for run in ids if run in specs and run not in taken]
        if not set(ids) <= (finished | specs.keys()):
            continue
        parts = equal_parts(wanted, max(1, cap(wanted))) if wanted else []
        split_into(folder, path, parts)
        taken.update(ids)
        found += [PlannedStack(part) for part in parts]
    return found


def remove_leftovers(folder: SweepFolder) -> None:
    """Remove what killed processes were writing. Call it in one's turn, when nobody trains."""
    for pattern in (".*.tmp", "*.lock"):
        for path in folder.stacks.glob(pattern):
            path.unlink(missing_ok=True)


def _checkpoints(folder: SweepFolder) -> list[tuple[Path, tuple[str, ...]]]:
    """Each checkpoint and its runs. One that cannot be read, or is damaged, is removed: its stack starts anew."""
    found = []
    for path in folder.stacks.glob("[!.]*.checkpoint.safetensors"):
        try:
            metadata, _ = load_checked(path)
            found.append((path, tuple(metadata["runs"])))
        except (SandmaskError, KeyError):
            path.unlink(missing_ok=True)
    return found


def split_into(folder: SweepFolder, checkpoint: Path, parts: Sequence[Sequence[RunSpec]]) -> None:
    """Give each part of a half-trained stack a checkpoint of its own, in place of the whole's."""
    targets = [(part, folder.checkpoint(stack_id(spec.id for spec in part))) for part in parts]
    if [path for _, path in targets] == [checkpoint]:
        return
    split_checkpoint(checkpoint, targets)
    checkpoint.unlink()
