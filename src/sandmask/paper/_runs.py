"""The runs of the paper's own experiments: trained as stacks, and kept stack by stack."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sandmask.datasets import Dataset
from sandmask.paper._product import Report, silent
from sandmask.records import RunRecord, RunSpec, read_runs, write_archive
from sandmask.training import Progress, stack_key, train_stack

Source = Callable[[RunSpec], str]  # the name of the data that a run is trained on
Load = Callable[[RunSpec], Dataset]


def stacks(specs: Sequence[RunSpec], source: Source) -> list[list[RunSpec]]:
    """Runs that train as one program on the same data."""
    found: dict[tuple[object, ...], list[RunSpec]] = {}
    for spec in specs:
        found.setdefault((stack_key(spec), source(spec)), []).append(spec)
    return list(found.values())


def train_runs(
    specs: Sequence[RunSpec],
    source: Source,
    load: Load,
    folder: Path,
    device: torch.device,
    report: Report = silent,
    *,
    weights: str | None = None,
) -> list[RunRecord]:
    """Train all runs. What is done is kept in `folder`; what was started goes on there."""
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(spec.steps for spec in specs)
    runs: list[RunRecord] = []
    before = 0
    for stack in stacks(specs, source):
        ids = hashlib.sha256("".join(spec.id for spec in stack).encode()).hexdigest()[:8]
        name = f"{stack[0].algorithm.lower()}-{source(stack[0])}-{ids}"
        archive, checkpoint = folder / f"{name}.records.parquet", folder / f"{name}.safetensors"
        if not archive.exists():
            what = f"{stack[0].algorithm}, {source(stack[0])}, {len(stack)} runs"
            report(what, before, total)

            def tell(progress: Progress, what: str = what, before: int = before, count: int = len(stack)) -> None:
                report(what, before + count * progress.done, total)

            records = train_stack(stack, load(stack[0]), device, checkpoint, on_progress=tell, weights=weights)
            write_archive(records, archive)
            checkpoint.unlink(missing_ok=True)
        runs += read_runs(archive)
        before += sum(spec.steps for spec in stack)
    return runs
