"""The AND-mask with a memory, after Parascandolo et al. (ICLR 2021): agreement over environments and time."""

from dataclasses import replace

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, Hparams, Metrics, State
from sandmask.algorithms.and_mask import PAPER, RESCALE, TAU, ANDMaskAlgorithm
from sandmask.hparams import BELOW_ONE, Choice, Hparam
from sandmask.masks import TensorMoments


class TemporalANDMask(ANDMaskAlgorithm):
    """m = 1[|a| >= tau]; the update is m * mean_e(g_e), with `rescale` divided by the mean of m.

    a is the moving average a <- b a + (1 - b) mean_e sign(g_e) over steps, from 0 and corrected by 1 / (1 - b^t), where
    b is `sign_memory`; with 0 it is the AND-mask.

    The paper has a "temporal AND-mask Adam" (its algorithm 1) for many environments that do not fit into one
    minibatch; its code was not released. This is our own rule after that idea, not a transcription: averaging the
    signs of all environments, the correction, masking the gradient before Adam, and the values of b are ours.
    """

    training_only = ("signs", "signs_weight")

    def extra_state(self, seed: int) -> State:
        """The moving sums of the signs and of their weights."""
        return {"signs": torch.zeros(self.network.numel), "signs_weight": torch.zeros(())}

    def masked(self, state: State, moments: TensorMoments, hparams: Hparams) -> tuple[Tensor, State, Metrics]:
        """The AND-mask of the averaged signs."""
        memory = hparams["sign_memory"]
        signs = memory * state["signs"] + (1.0 - memory) * (moments.sign_sum / moments.count)
        weight = memory * state["signs_weight"] + (1.0 - memory)  # 1 - b^t, rounded like signs that always agreed
        averaged = replace(moments, sign_sum=signs / weight * moments.count)
        gradient, _, metrics = super().masked(state, averaged, hparams)
        return gradient, {"signs": signs, "signs_weight": weight}, metrics


ALGORITHMS.register(
    AlgorithmEntry(
        name="ANDMask-temporal",
        summary="AND-mask whose agreement is also averaged over steps",
        paper=f"a variant of ours; {PAPER}",
        build=TemporalANDMask,
        compares_environments=False,
        hparams=(*TAU, RESCALE, Hparam("sign_memory", 0.9, Choice(0.5, 0.9, 0.99), BELOW_ONE)),
    )
)
