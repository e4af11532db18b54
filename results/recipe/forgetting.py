"""Masks that forget on purpose: they shrink weights whose gradient is masked, without weight decay.

L2 inside Adam shrinks a weight p by `lr * decay * p / rms(gradient + decay * p)` per step, which is by accident a rule
about the mask. The rule written down: with no decay of any kind, every step subtracts

    lr * p / (rms(p) + rms(masked gradient) / forget)

where rms is over the past steps (running means of squares with beta 0.999, corrected for their start at 0). `forget`
has the role of the decay. Two parts can be left out, each in a variant of its own:

- `-to-zero`: |p| instead of rms(p), so that a closed weight shrinks by `lr` until it is exactly 0;
- `-at-once`: what is closed at this step shrinks, however recently it was open.

Use it as a plugin:

    sandmask train Spirals ForgettingANDMask --plugin results/recipe/forgetting.py --hparam weight_decay=0
"""

import torch
from torch import Tensor

from sandmask.algorithms import ALGORITHMS, AlgorithmEntry, Hparams, MaskedAlgorithm, Metrics, State
from sandmask.hparams import FRACTION, POSITIVE, Constant, Hparam
from sandmask.masks import ANDMask, Mask, SANDMask, TensorMoments

BETA, EPS = 0.999, 1e-8


class ForgettingANDMask(MaskedAlgorithm):
    """The rescaled AND-mask, which shrinks weights that it keeps closed."""

    slows_down, remembers = True, True

    def extra_state(self, seed: int) -> State:  # noqa: ARG002
        """Running means of the squares of weights and of masked gradients, and the number of steps."""
        zeros = torch.zeros(self.network.numel)
        return {"weight_square": zeros, "gradient_square": zeros.clone(), "forgot": torch.zeros(())}

    def mask(self, hparams: Hparams) -> Mask:
        """The rescaled AND-mask."""
        return ANDMask(tau=hparams["tau"], rescale="sparsity")

    def update(self, state: State, moments: TensorMoments, risks: Tensor, hparams: Hparams) -> tuple[State, Metrics]:
        """An Adam step on the masked gradient, then the forgetting."""
        weights, (gradient, _, _) = state["params"], self.masked(state, moments, hparams)
        new, metrics = super().update(state, moments, risks, hparams)
        squares = {
            "weight_square": torch.lerp(weights.square(), state["weight_square"], BETA),
            "gradient_square": torch.lerp(gradient.square(), state["gradient_square"], BETA),
            "forgot": state["forgot"] + 1,
        }
        weight_rms, gradient_rms = (
            (squares[name] / (1 - BETA ** squares["forgot"])).sqrt() for name in ("weight_square", "gradient_square")
        )
        size = weight_rms if self.slows_down else weights.abs()
        opened = gradient_rms if self.remembers else torch.where(gradient == 0, 0.0, torch.inf)
        params = new["params"] - hparams["lr"] * weights / (size + opened / hparams["forget"] + EPS)
        if not self.slows_down:
            params = torch.where(params * new["params"] < 0, 0.0, params)
        return {**new, **squares, "params": params}, metrics


class ToZero(ForgettingANDMask):
    """Closed weights shrink to exactly 0."""

    slows_down = False


class AtOnce(ForgettingANDMask):
    """Forgets when an element was last open."""

    remembers = False


class ForgettingSANDMask(ForgettingANDMask):
    """The rescaled SAND-mask, which shrinks weights that it keeps closed."""

    def mask(self, hparams: Hparams) -> Mask:
        """The rescaled SAND-mask."""
        return SANDMask(tau=hparams["tau"], rescale="sparsity")


VARIANTS = {
    "ForgettingANDMask": ForgettingANDMask,
    "ForgettingANDMask-to-zero": ToZero,
    "ForgettingANDMask-at-once": AtOnce,
    "ForgettingSANDMask": ForgettingSANDMask,
}
for name, build in VARIANTS.items():
    ALGORITHMS.register(
        AlgorithmEntry(
            name=name,
            summary="a rescaled mask; weights that it keeps closed shrink",
            paper="an experiment of this repository",
            build=build,
            hparams=(
                Hparam("tau", 0.9, Constant(0.9), FRACTION),
                Hparam("forget", 3e-4, Constant(3e-4), POSITIVE),
            ),
        )
    )
