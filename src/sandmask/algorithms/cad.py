"""Contrastive adversarial domain bottlenecks (Ruan et al., ICLR 2022)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, Pairs, State, environment_risks, pairs_of
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import NON_NEGATIVE, POSITIVE, Bounds, Choice, Constant, Hparam

_BASE_TEMPERATURE = 0.07
_SWITCH = Bounds(0, 1)
HPARAMS = (
    Hparam("lmbda", 0.1, Choice(1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2), NON_NEGATIVE),
    Hparam("temperature", 0.1, Choice(0.05, 0.1), POSITIVE),
    Hparam("is_normalized", 0, Constant(0), _SWITCH),
    Hparam("is_flipped", 1, Constant(1), _SWITCH),
)
PAPER = "Ruan et al., Optimal representations for covariate shift, ICLR 2022"


class CAD(ObjectiveAlgorithm):
    """Minimize mean_e R_e + lmbda mean_i l_i, where l_i = -(T / 0.07) log sum_(j of another environment) q_ij.

    q_ij = exp(z_i . z_j / T) / sum_(k != i) exp(z_i . z_k / T), where z are the features of all examples and T is the
    temperature. If `is_normalized` is 1, features are divided by their norm. If `is_flipped` is 0, l_i = (T / 0.07)
    log sum_(j != i of the same environment) q_ij. The mean is over the examples i that have the same class as another
    example, and whose sum over j has at least one term.

    (In DomainBed's code, the sum for `is_flipped` = 0 contains the example itself, and `is_project`, which is off,
    refers to an undefined name. Here, the example is left out, and there is no `is_project`.)
    """

    conditional = False  # whether the sums are only over examples of the class of i

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus the weighted mean of l_i."""
        features = self.features(params, batch, hparams)
        risk = environment_risks(self.network.classify(params, features), batch).mean()
        z = features.flatten(0, 1)
        z = torch.where(hparams["is_normalized"] > 0, F.normalize(z, dim=-1), z)
        temperature = hparams["temperature"]
        penalty = bottleneck(z @ z.T / temperature, pairs_of(batch), hparams["is_flipped"] > 0, self.conditional)
        return risk + hparams["lmbda"] * temperature / _BASE_TEMPERATURE * penalty, {}


class CondCAD(CAD):
    """CAD with sums only over examples of the class of i. The mean is over the i whose sum has at least one term."""

    conditional = True


def bottleneck(scores: Tensor, pairs: Pairs, flipped: Tensor, conditional: bool) -> Tensor:
    """Return the mean of l_i / (T / 0.07), given the scores z_i . z_j / T; 0 if no example counts."""
    among = pairs.other & pairs.same_class if conditional else pairs.other
    chosen = among & (pairs.same_environment ^ flipped)
    counts = chosen.any(-1) & (pairs.other & pairs.same_class).any(-1)
    log_share = _log_sum(scores, chosen) - _log_sum(scores, among)
    losses = torch.where(counts, torch.where(flipped, -log_share, log_share), 0.0)
    return losses.sum() / counts.sum().clamp_min(1)


def _log_sum(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return log sum_j exp(s_ij) over the chosen j. Without any, the result and its gradient are finite as well."""
    empty = ~chosen.any(-1, keepdim=True)
    return torch.where(chosen | empty, scores, -torch.inf).logsumexp(-1)


ALGORITHMS.register(
    AlgorithmEntry(
        name="CAD",
        summary="Learn features whose neighbours come from all environments alike",
        paper=PAPER,
        build=CAD,
        hparams=HPARAMS,
    )
)
ALGORITHMS.register(
    AlgorithmEntry(name="CondCAD", summary="CAD within each class", paper=PAPER, build=CondCAD, hparams=HPARAMS)
)
