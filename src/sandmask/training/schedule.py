"""Learning-rate schedules. Their settings are hyperparameters, so runs with different schedules train in one stack.

A learning rate may also drop when the validation loss stops falling, as in ERM++'s search for a learning rate
(`Plateau`). All functions take tensors of K runs, with K as the first dimension.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sandmask.algorithms import Hparams
from sandmask.hparams._shared import LR_DROP_STEPS

# The hyperparameters by which a schedule is multiplied.
RATES = ("lr", "lr_g", "lr_d", "eqrm_lr", "rdm_lr", "urm_discriminator_lr", "linear_lr", "convergence_rate")
SCHEDULE = ("lr_final", "lr_drop", "lr_drop_every", "lr_warmup", *LR_DROP_STEPS)
PATIENCE = "lr_patience"
FACTOR, THRESHOLD, DROPS = 0.1, 1e-4, 3  # of a drop; the least relative improvement; the last drop ends training

Plateau = dict[str, Tensor]  # tensors [K]


def lr_factor(hparams: Hparams, step: Tensor, steps: int) -> Tensor:
    """The factor of the learning rate at `step` (from 0) of `steps`: cosine times drops times warm-up.

    - `lr_final`: the factor at the end of half a cosine wave that starts at 1;
    - `lr_drop`, `lr_drop_every`: multiply by `lr_drop` after every fraction `lr_drop_every` of the training;
    - `lr_drop_step_1` to `_3`: divide by 10 after each of these steps; the third step ends the training;
    - `lr_warmup`: the fraction of the training in which the factor rises linearly from 0 to 1.
    """
    done = step.to(torch.float32) / steps
    factor = torch.ones_like(done)
    if "lr_final" in hparams:
        final = hparams["lr_final"]
        factor = factor * (final + (1.0 - final) * 0.5 * (1.0 + torch.cos(math.pi * done)))
    if "lr_drop" in hparams:
        # Drops are counted in whole steps: at 0.75 of 600 steps, the drop is at step 450, however 0.75 is rounded.
        every = (hparams.get("lr_drop_every", torch.ones_like(done)) * steps).round().clamp(min=1.0)
        factor = factor * hparams["lr_drop"] ** torch.floor(step / every)
    if repeats(hparams):
        planned = [hparams[name] for name in LR_DROP_STEPS if name in hparams]
        factor = factor * plateau_factor(torch.stack([(at > 0) & (step > at) for at in planned]).sum(0))
    if "lr_warmup" in hparams:
        length = (hparams["lr_warmup"] * steps).clamp(min=1.0)
        factor = factor * ((step + 1.0) / length).clamp(max=1.0)
    return factor


def scheduled(hparams: Hparams, step: Tensor, steps: int, plateau: Plateau | None = None) -> Hparams:
    """The given hyperparameters with the learning rates of one step."""
    if plateau is None and not any(name in hparams for name in SCHEDULE):
        return hparams
    factor = lr_factor(hparams, step, steps)
    if plateau is not None:
        factor = factor * plateau_factor(plateau["drops"])
    return {name: value * factor if name in RATES else value for name, value in hparams.items()}


def start_plateau(n_runs: int, device: torch.device) -> Plateau:
    """The state before the first evaluation: lowest loss, evaluations since then, drops, and last evaluated step."""
    zeros = torch.zeros(n_runs, device=device)
    return {"best": zeros + torch.inf, "waiting": zeros, "drops": zeros.clone(), "step": zeros - 1.0}


def step_plateau(plateau: Plateau, loss: Tensor, step: int, hparams: Hparams) -> Plateau:
    """Update the plateau after an evaluation at `step` with this validation loss [K]. Repeating it changes nothing.

    As in `torch.optim.lr_scheduler.ReduceLROnPlateau`, the learning rate drops if the loss does not improve in more
    than `lr_patience` consecutive evaluations. Evaluations within `linear_steps` and after the last drop do not count.
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
    """The factor of the learning rates after this number of drops; 0 after the last drop."""
    return torch.where(drops >= DROPS, 0.0, FACTOR**drops)


def repeats(hparams: Mapping[str, object]) -> bool:
    """Whether a run drops its learning rate at given steps: see `LR_DROP_STEPS`."""
    return any(name in hparams for name in LR_DROP_STEPS)
