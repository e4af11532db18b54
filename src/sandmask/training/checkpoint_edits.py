"""Checkpoints that are made from others: of the same run with more steps, and of some of a stack's runs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sandmask.errors import SandmaskError
from sandmask.records import RunSpec, averages_of
from sandmask.training.checkpoint import load_checked, load_metadata, save_tree
from sandmask.training.evaluation import evaluation_steps
from sandmask.training.plateau import PATIENCE

# The values for which a hyperparameter of a learning-rate schedule leaves the rate as it is.
_CONSTANT = {"lr_final": 1.0, "lr_drop": 1.0, "lr_warmup": 0.0}


def is_longer(spec: RunSpec, than: RunSpec) -> bool:
    """Whether a run is the other one with more steps."""
    return spec.steps > than.steps and replace(spec, steps=than.steps) == than


def extend_checkpoint(path: Path, old: RunSpec, new: RunSpec) -> None:
    """Turn the checkpoint of a run into that of the same run with more steps; refuse what would not be the same run.

    A step does not depend on how many steps follow, so the longer run ends as if it had been started as such.
    """
    if reason := _depends_on_steps(new):
        raise SandmaskError(
            f"The run in {path.parent} has {old.steps} steps. It cannot be given more, because {reason} depends on the "
            "number of steps. Choose another folder with --out."
        )
    if not path.exists():
        raise SandmaskError(
            f"The run in {path.parent} is finished after {old.steps} steps, and its checkpoint was not kept, so it "
            f"cannot continue to {new.steps} steps. Choose another folder with --out. To give runs more steps later, "
            "train them with --keep-checkpoint."
        )
    if load_metadata(path).get("runs") == [new.id]:
        return  # a call before this one was killed right after this file was written
    metadata, leaves = load_checked(path)
    if metadata["runs"] != [old.id]:
        raise SandmaskError(f"{path} belongs to another run. Choose another folder with --out.")
    rows = -(-old.steps // old.checkpoint_every)  # evaluations of the old run that the new one has, too
    longer = {
        name: _with_rows(leaf, rows, new, fill=0.0 if name == "history.counts" else torch.nan)
        if name.startswith("history.")
        else leaf
        for name, leaf in leaves.items()
    }
    save_tree(path, longer, {**metadata, "runs": [new.id]})


def _with_rows(leaf: Tensor, rows: int, spec: RunSpec, fill: float) -> Tensor:
    """The first rows of a tensor of evaluations, with room for all evaluations of a run."""
    total = sum(1 for _ in evaluation_steps(spec.steps, spec.checkpoint_every))
    longer = torch.full((total, *leaf.shape[1:]), fill, dtype=leaf.dtype)
    longer[:rows] = leaf[:rows]
    return longer


def _depends_on_steps(spec: RunSpec) -> str:
    """The reason why the first steps of a run depend on their number; "" if they do not."""
    schedule = ", ".join(_schedule(spec))
    if schedule:
        return f"its learning-rate schedule ({schedule})"
    if spec.hparams.get(PATIENCE, 0):
        return "the evaluation after the last step, and with it lr_patience,"
    return "its average swad" if "swad" in averages_of(spec.options) else ""


def _schedule(spec: RunSpec) -> Iterator[str]:
    return (f"{name}={spec.hparams[name]:g}" for name, off in _CONSTANT.items() if spec.hparams.get(name, off) != off)


def split_checkpoint(checkpoint: Path, parts: Sequence[tuple[Sequence[RunSpec], Path]]) -> None:
    """Split the checkpoint of a stack into checkpoints of some of its runs.

    :param checkpoint: checkpoint of the stack.
    :param parts: runs and the file to write, for each part.
    """
    metadata, leaves = load_checked(checkpoint)
    for specs, path in parts:
        ids = [spec.id for spec in specs]
        chosen = torch.tensor([metadata["runs"].index(run) for run in ids])

        def of_runs(name: str, leaf: Tensor, chosen: Tensor = chosen) -> Tensor:
            return leaf.index_select(1 if name.startswith("history.") else 0, chosen)

        save_tree(path, {name: of_runs(name, leaf) for name, leaf in leaves.items()}, {**metadata, "runs": ids})
