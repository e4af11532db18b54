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
    """min mean_e R_e + lmbda mean_i l_i, l_i = -(T / 0.07) log sum_(j of another environment) q_ij.

    q_ij = exp(z_i . z_j / T) / sum_(k != i) exp(z_i . z_k / T), of the features z of all examples, divided by their
    norm where `is_normalized` is 1. Where `is_flipped` is 0, l_i = (T / 0.07) log sum_(j != i of the same environment)
    q_ij. An example counts if another one has its class, and if the sum has terms.

    (In DomainBed's code the sum of the variant that is not flipped contains the example itself, and `is_project`, which
    is off, refers to an undefined name. Here the former is left out, and the latter does not exist.)
    """

    conditional = False  # whether the sums are over examples of i's class alone

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus the weighted bottleneck."""
        features = self.features(params, batch, hparams)
        risk = environment_risks(self.network.classify(params, features), batch).mean()
        z = features.flatten(0, 1)
        z = torch.where(hparams["is_normalized"] > 0, F.normalize(z, dim=-1), z)
        temperature = hparams["temperature"]
        penalty = bottleneck(z @ z.T / temperature, pairs_of(batch), hparams["is_flipped"] > 0, self.conditional)
        return risk + hparams["lmbda"] * temperature / _BASE_TEMPERATURE * penalty, {}


class CondCAD(CAD):
    """CAD with every sum over examples of i's class; i counts if its sum has terms."""

    conditional = True


def bottleneck(scores: Tensor, pairs: Pairs, flipped: Tensor, conditional: bool) -> Tensor:
    """The mean of l_i without its factor, of z_i . z_j / T; 0 if no example counts."""
    among = pairs.other & pairs.same_class if conditional else pairs.other
    chosen = among & (pairs.same_environment ^ flipped)
    counts = chosen.any(-1) & (pairs.other & pairs.same_class).any(-1)
    log_share = _log_sum(scores, chosen) - _log_sum(scores, among)
    losses = torch.where(counts, torch.where(flipped, -log_share, log_share), 0.0)
    return losses.sum() / counts.sum().clamp_min(1)


def _log_sum(scores: Tensor, chosen: Tensor) -> Tensor:
    """log sum_j exp(s_ij) over the chosen j; finite also for a row without any, so that its gradient is."""
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
