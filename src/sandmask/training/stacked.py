"""Many runs as one program, from specs to records: what a sweep is made of."""

from collections.abc import Sequence
from pathlib import Path

import torch

from sandmask.datasets import Dataset
from sandmask.plugins import plugin_failures_named
from sandmask.records import RunRecord, RunSpec
from sandmask.training.checkpoint import load_checked, save_tree
from sandmask.training.loop import CHECKPOINT_SECONDS, Report, Trainer
from sandmask.training.precision import temporary_precision
from sandmask.training.stack import Stack


def train_stack(
    specs: Sequence[RunSpec],
    dataset: Dataset,
    device: torch.device,
    checkpoint: Path,
    *,
    weights: str | None = None,
    compiled: bool = False,
    fast: bool = True,
    diagnostics: bool = False,
    report: Report = lambda _: None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> list[RunRecord]:
    """Train runs that share a `stack_key` as one program, and return their records, each done or diverged.

    The evaluations live in `checkpoint` until the end: interrupted or killed, the same call goes on from there. It is
    for the caller to write the records and then to delete that file.

    With `fast`, on a GPU, the program is captured as CUDA graphs; with `compiled` the network is compiled.
    `diagnostics` adds metrics, and changes nothing else.
    """
    with temporary_precision(specs[0].precision), plugin_failures_named():
        trainer = Trainer(
            Stack(specs, dataset, device, weights=weights, compiled=compiled, diagnostics=diagnostics),
            checkpoint,
            report,
            checkpoint_seconds=checkpoint_seconds,
            fast=fast,
        )
        trainer.run()
    return trainer.records()


def split_checkpoint(checkpoint: Path, parts: Sequence[tuple[Sequence[RunSpec], Path]]) -> None:
    """Write, for some of a checkpoint's runs each, a checkpoint of their own: `[(specs, path), ...]`."""
    metadata, leaves = load_checked(checkpoint)
    for specs, path in parts:
        ids = [spec.id for spec in specs]
        chosen = torch.tensor([metadata["runs"].index(run) for run in ids])

        def of_runs(name: str, leaf: torch.Tensor, chosen: torch.Tensor = chosen) -> torch.Tensor:
            return leaf.index_select(1 if name.startswith("history.") else 0, chosen)

        save_tree(path, {name: of_runs(name, leaf) for name, leaf in leaves.items()}, {**metadata, "runs": ids})
