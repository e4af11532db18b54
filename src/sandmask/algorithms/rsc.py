"""Representation self-challenging (Huang et al., ECCV 2020)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State, cross_entropy, environment_risks
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import FRACTION, Hparam, Uniform


class RSC(ObjectiveAlgorithm):
    """Minimize mean_e R_e with the most predictive features set to 0, in the examples where this matters most.

    Equations 1 to 5: in an example with features z and label y, a share `rsc_f_drop_factor` of the features is set to
    0, those with the largest d logit_y / dz. This is done in a share `rsc_b_drop_factor` of all examples, those whose
    confidence in y it lowers most. Values equal to a percentile count as above it.
    """

    linear_only = True
    by_environment = False  # it reads the classifier's weights

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk with some features set to 0."""
        features = self.features(params, batch, hparams)
        kept = self._kept(params, features.detach(), batch, hparams)
        return environment_risks(self.network.classify(params, features * kept), batch).mean(), {}

    def _kept(self, params: Params, features: Tensor, batch: EnvBatch, hparams: Hparams) -> Tensor:
        """Return 1 for the features that are kept and 0 for the others: [E, B, D]."""
        # The classifier is linear, so the gradient of logit y with respect to the features is row y of its weight.
        weight = params["classifier.weight"].detach()
        spared = below_percentile(weight, 1.0 - hparams["rsc_f_drop_factor"])[batch.y]
        muted = features * spared
        lost = self._confidence(params, features, batch.y) - self._confidence(params, muted, batch.y)
        true = batch.weight.flatten() > 0
        lost = torch.where(true, lost.flatten(), torch.inf)  # padding is sorted last and not counted
        unmoved = below_percentile(lost, 1.0 - hparams["rsc_b_drop_factor"], true.sum())
        return (spared | batch.split(unmoved).unsqueeze(-1)).to(features.dtype)

    def _confidence(self, params: Params, features: Tensor, y: Tensor) -> Tensor:
        """Return the predicted probability of the label of every example: [E, B]."""
        return torch.exp(-cross_entropy(self.network.classify(params, features), y).detach())


def below_percentile(values: Tensor, fraction: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Return whether each value is below a percentile of its row's `count` smallest values: [..., n] -> [..., n].

    The percentile lies between the two values whose ranks are next to (count - 1) * fraction. A value is below it if
    and only if it is below the upper one of the two, and this comparison has no rounding errors.
    """
    count = values.shape[-1] if count is None else count
    # Without the 1e-3, a rank that is an integer up to rounding (2/3 of 255) might be rounded up to the next one.
    rank = torch.ceil((count - 1) * fraction - 1e-3).clamp_min(0.0).to(torch.int64)
    ordered = values.sort(-1).values
    threshold = ordered.gather(-1, rank.expand(*values.shape[:-1], 1))
    return values < threshold


ALGORITHMS.register(
    AlgorithmEntry(
        name="RSC",
        summary="Mask the most predictive features, so that others are learned as well",
        paper="Huang et al., Self-challenging improves cross-domain generalization, ECCV 2020",
        build=RSC,
        compares_environments=False,
        hparams=(
            Hparam("rsc_f_drop_factor", 1 / 3, Uniform(0, 0.5), FRACTION),
            Hparam("rsc_b_drop_factor", 1 / 3, Uniform(0, 0.5), FRACTION),
        ),
    )
)
