"""Learning-rate schedules, as numbers: runs with different schedules train in one stack."""

import math

import torch
from torch import Tensor

from sandmask.algorithms import Hparams
from sandmask.hparams._shared import LR_DROP_STEPS
from sandmask.training.plateau import Plateau, plateau_factor, repeated_drops, repeats

# The hyperparameters that a schedule multiplies.
RATES = ("lr", "lr_g", "lr_d", "eqrm_lr", "rdm_lr", "urm_discriminator_lr", "linear_lr", "convergence_rate")
SCHEDULE = ("lr_final", "lr_drop", "lr_drop_every", "lr_warmup", *LR_DROP_STEPS)


def lr_factor(hparams: Hparams, step: Tensor, steps: int) -> Tensor:
    """The factor of the learning rate at `step` (from 0) of `steps`: cosine times drops times warm-up.

    - `lr_final`: the factor at the end of half a cosine wave that starts at 1;
    - `lr_drop`, `lr_drop_every`: multiply by `lr_drop` after each such fraction of the training;
    - `lr_drop_step_1` to `_3`: divide by 10 after each of these steps, and end with the third: see `plateau`;
    - `lr_warmup`: the fraction of the training in which the factor rises linearly from 0 to 1.
    """
    done = step.to(torch.float32) / steps
    factor = torch.ones_like(done)
    if "lr_final" in hparams:
        final = hparams["lr_final"]
        factor = factor * (final + (1.0 - final) * 0.5 * (1.0 + torch.cos(math.pi * done)))
    if "lr_drop" in hparams:
        # Counted in whole steps: at 0.75 of 600 steps the drop comes at step 450, however 0.75 is rounded.
        every = (hparams.get("lr_drop_every", torch.ones_like(done)) * steps).round().clamp(min=1.0)
        factor = factor * hparams["lr_drop"] ** torch.floor(step / every)
    if repeats(hparams):
        factor = factor * plateau_factor(repeated_drops(hparams, step))
    if "lr_warmup" in hparams:
        length = (hparams["lr_warmup"] * steps).clamp(min=1.0)
        factor = factor * ((step + 1.0) / length).clamp(max=1.0)
    return factor


def scheduled(hparams: Hparams, step: Tensor, steps: int, plateau: Plateau | None = None) -> Hparams:
    """The hyperparameters of one step: those given, with the learning rates of that step."""
    if plateau is None and not any(name in hparams for name in SCHEDULE):
        return hparams
    factor = lr_factor(hparams, step, steps)
    if plateau is not None:
        factor = factor * plateau_factor(plateau["drops"])
    return {name: value * factor if name in RATES else value for name, value in hparams.items()}
