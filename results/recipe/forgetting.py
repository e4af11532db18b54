"""An AND-mask that forgets on purpose: elements that stayed closed for `forget_after` steps shrink by `lr` a step.

It asks whether this is what weight decay inside Adam's gradient does; give it no weight decay of any kind.
"""

import torch
from torch import Tensor

from sandmask.algorithms import ALGORITHMS, AlgorithmEntry, Hparams, MaskedAlgorithm, Metrics, State
from sandmask.hparams import FRACTION, NON_NEGATIVE, Constant, Hparam
from sandmask.masks import ANDMask, Mask, TensorMoments


class ForgettingANDMask(MaskedAlgorithm):
    """The rescaled AND-mask; p moves towards 0 by `forget_rate` times `lr` where the mask has been closed for long."""

    def extra_state(self, seed: int) -> State:  # noqa: ARG002
        """How many steps each element has been closed."""
        return {"closed": torch.zeros(self.network.numel)}

    def mask(self, hparams: Hparams) -> Mask:
        """The rescaled AND-mask."""
        return ANDMask(tau=hparams["tau"], rescale="sparsity")

    def update(self, state: State, moments: TensorMoments, risks: Tensor, hparams: Hparams) -> tuple[State, Metrics]:
        """An Adam step, then the forgetting."""
        weights, _ = self.mask(hparams).weigh(moments)
        closed = torch.where(weights > 0, 0.0, state["closed"] + 1.0)
        new, metrics = super().update(state, moments, risks, hparams)
        params = new["params"]
        shrunk = params.sign() * (params.abs() - hparams["lr"] * hparams["forget_rate"]).clamp(min=0.0)
        params = torch.where(closed > hparams["forget_after"], shrunk, params)
        return {**new, "params": params, "closed": closed}, metrics


ALGORITHMS.register(
    AlgorithmEntry(
        name="ForgettingANDMask",
        summary="AND-mask, rescaled; elements that stay closed shrink towards zero",
        paper="an experiment of this repository",
        build=ForgettingANDMask,
        hparams=(
            Hparam("tau", 0.9, Constant(0.9), FRACTION),
            Hparam("forget_after", 100.0, Constant(100.0), NON_NEGATIVE),
            Hparam("forget_rate", 1.0, Constant(1.0), NON_NEGATIVE),
        ),
    )
)
