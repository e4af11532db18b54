"""Train the runs of a figure or of a quick table, one stack after the other."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sandmask.datasets import Dataset
from sandmask.paper._product import OnProgress
from sandmask.records import RunRecord, RunSpec, read_runs, write_archive
from sandmask.training import Progress, stack_key, train_stack


def stacks(specs: Sequence[RunSpec]) -> list[list[RunSpec]]:
    """Group runs that train as one program on the same data."""
    found: dict[tuple[object, ...], list[RunSpec]] = {}
    for spec in specs:
        found.setdefault((stack_key(spec), *sorted(spec.options.items())), []).append(spec)
    return list(found.values())


def train_runs(
    specs: Sequence[RunSpec],
    load: Callable[[RunSpec], Dataset],
    folder: Path,
    device: torch.device,
    on_progress: OnProgress,
    *,
    weights: str | None = None,
) -> list[RunRecord]:
    """Train all runs and return their records. A rerun with the same folder resumes.

    :param specs: specs of the runs.
    :param load: returns the data of a run, which its dataset and options determine.
    :param folder: folder for the records and checkpoints.
    :param device: where to train.
    :param on_progress: called with the steps done, of all runs together.
    :param weights: "none" for networks without pretrained weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(spec.steps for spec in specs)
    runs: list[RunRecord] = []
    before = 0
    for stack in stacks(specs):
        first = stack[0]
        options = "-".join(f"{name}-{value:g}" for name, value in first.options.items())
        ids = hashlib.sha256("".join(spec.id for spec in stack).encode()).hexdigest()[:8]
        name = f"{first.algorithm.lower()}-{options}-{ids}"
        archive, checkpoint = folder / f"{name}.records.parquet", folder / f"{name}.safetensors"
        if not archive.exists():
            task = f"{first.algorithm} on {first.dataset}, {options}, {len(stack)} runs"
            on_progress(task, before, total)

            def tell(progress: Progress, task: str = task, before: int = before, count: int = len(stack)) -> None:
                on_progress(task, before + count * progress.done, total)

            records = train_stack(stack, load(first), device, checkpoint, on_progress=tell, weights=weights)
            write_archive(records, archive)
            checkpoint.unlink(missing_ok=True)
        runs += read_runs(archive)
        before += sum(spec.steps for spec in stack)
    return runs
