"""A learning rate that drops where the validation loss stops falling: ERM++'s search for a learning rate.

All functions take stacked tensors: K runs in the first dimension, each with its own numbers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sandmask.algorithms import Hparams
from sandmask.hparams._shared import LR_DROP_STEPS

PATIENCE = "lr_patience"
FACTOR, THRESHOLD, DROPS = 0.1, 1e-4, 3  # of the rate; a relative improvement that counts; the last drop stops a run

Plateau = dict[str, Tensor]  # tensors [K]


def start_plateau(n_runs: int, device: torch.device) -> Plateau:
    """Before the first evaluation: the lowest loss, evaluations since then, drops, and the step of the last look."""
    zeros = torch.zeros(n_runs, device=device)
    return {"best": zeros + torch.inf, "waiting": zeros, "drops": zeros.clone(), "step": zeros - 1.0}


def look(plateau: Plateau, loss: Tensor, step: int, hparams: Hparams) -> Plateau:
    """The plateau after an evaluation at `step` with this validation loss [K]; a second look changes nothing.

    As `torch.optim.lr_scheduler.ReduceLROnPlateau`: the rate drops once the loss was not lower in more than
    `lr_patience` evaluations in a row. Evaluations within `linear_steps` and after the last drop do not count.
    """
    counts = (plateau["step"] < step) & (hparams[PATIENCE] > 0) & (plateau["drops"] < DROPS)
    counts = counts & (step >= hparams.get("linear_steps", torch.zeros_like(loss)))
    better = loss < plateau["best"] * (1.0 - THRESHOLD)
    waiting = torch.where(better, 0.0, plateau["waiting"] + 1.0)
    drops = waiting > hparams[PATIENCE]
    found = {
        "best": torch.where(better, loss, plateau["best"]),
        "waiting": torch.where(drops, 0.0, waiting),
        "drops": plateau["drops"] + drops,
        "step": torch.full_like(loss, float(step)),
    }
    return {name: torch.where(counts, new, plateau[name]) for name, new in found.items()}


def plateau_factor(drops: Tensor) -> Tensor:
    """The factor of the learning rates after so many drops: 0 after the last one."""
    return torch.where(drops >= DROPS, 0.0, FACTOR**drops)


def repeats(hparams: Mapping[str, object]) -> bool:
    """Whether a run drops its learning rate at given steps: see `LR_DROP_STEPS`."""
    return any(name in hparams for name in LR_DROP_STEPS)


def repeated_drops(hparams: Hparams, step: Tensor) -> Tensor:
    """How many of the drops at `LR_DROP_STEPS` come before `step`."""
    planned = [hparams[name] for name in LR_DROP_STEPS if name in hparams]
    return torch.stack([(at > 0) & (step > at) for at in planned]).sum(0)
