"""Invariant risk minimization (Arjovsky et al., 2019)."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State, change_step, environment_risks, one_hot, switched
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import NON_NEGATIVE, Hparam, IntLogUniform, LogUniform

PENALTY = (
    Hparam("irm_lambda", 100.0, LogUniform(10, -1, 5), NON_NEGATIVE),
    *change_step("irm_penalty_anneal_iters", 500, IntLogUniform(10, 0, 4), recipe=(100, IntLogUniform(10, 0, 3.3))),
)


class IRM(ObjectiveAlgorithm):
    """Minimize mean_e R_e + lambda mean_e (dR_e(s f) / ds at s = 1)^2 (IRMv1), where f are the logits.

    The square is estimated without bias; see `irm_penalty`. lambda is 1 before step `irm_penalty_anneal_iters` and
    `irm_lambda` from then on. Adam is reset at that step.
    """

    changes_at = ("irm_penalty_anneal_iters",)

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus the weighted penalty."""
        logits = self.logits(params, batch, hparams)
        risk = environment_risks(logits, batch).mean()
        return risk + weighted_irm_penalty(logits, state, batch, hparams), {}


def weighted_irm_penalty(logits: Tensor, state: State, batch: EnvBatch, hparams: Hparams) -> Tensor:
    """Return lambda times the mean penalty at this step."""
    weight = switched(state, hparams, "irm_penalty_anneal_iters", "irm_lambda", before=1.0)
    return weight * irm_penalty(logits, batch).mean()


def irm_penalty(logits: Tensor, batch: EnvBatch) -> Tensor:
    """Return the squared derivative of each environment's risk with respect to a scale of the logits: [E].

    The square is estimated by the product of the derivatives on the examples at even and at odd positions, which are
    independent.
    """
    slopes = scale_derivative(logits, batch.y)
    odd = batch.weight * (batch.positions % 2)
    even = batch.weight - odd
    first = (slopes * even).sum(-1) / even.sum(-1)
    second = (slopes * odd).sum(-1) / odd.sum(-1).clamp_min(1)  # if this half is empty, the penalty is 0
    return first * second


def scale_derivative(logits: Tensor, y: Tensor) -> Tensor:
    """Return d cross_entropy(s * logits, y) / ds at s = 1 of each example: sum_c (softmax_c - 1[c = y]) * logit_c."""
    return ((logits.softmax(-1) - one_hot(y, logits.shape[-1], logits.dtype)) * logits).sum(-1)


ALGORITHMS.register(
    AlgorithmEntry(
        name="IRM",
        summary="Penalize a classifier that is not optimal in every environment at once",
        paper="Arjovsky et al., Invariant risk minimization, 2019",
        build=IRM,
        hparams=PENALTY,
    )
)
