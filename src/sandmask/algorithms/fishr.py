"""Fishr: match the variances of the classifier's gradients between environments (Rame et al., ICML 2022)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State, change_step, environment_risks, one_hot, switched
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import BELOW_ONE, NON_NEGATIVE, Hparam, IntUniform, LogUniform, Uniform


class Fishr(ObjectiveAlgorithm):
    """Minimize mean_e R_e + lambda mean_e mean_k (v_ek - mean_e' v_e'k)^2.

    v_ek is the variance over the examples of environment e (divided by B) of the loss's derivative with respect to
    parameter k of the classifier, smoothed over steps: s_e <- ema s_e + (1 - ema) var_e, starting at 0, and v_e = s_e /
    (1 - ema), so that the gradient through var_e does not depend on ema. The weight lambda is 0 before step
    `penalty_anneal_iters`, and the hyperparameter `lambda` from then on. Adam is reset at that step. The averages are
    updated from the first step on.
    """

    linear_only = True
    changes_at = ("penalty_anneal_iters",)

    def extra_state(self, seed: int) -> State:
        """Return the moving averages of the variances, for the weights and the bias of the classifier."""
        return {"variances": torch.zeros(self.problem.n_envs, self.problem.n_classes, self.network.n_features + 1)}

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus the weighted scatter of the variances."""
        features = self.features(params, batch, hparams)
        logits = self.network.classify(params, features)
        now, ema = gradient_variances(features, logits, batch), hparams["ema"]
        smooth = now + ema / (1.0 - ema) * state["variances"]
        penalty = (smooth - smooth.mean(0)).square().mean()
        weight = switched(state, hparams, "penalty_anneal_iters", "lambda")
        changes = {"variances": (1.0 - ema) * smooth.detach()}
        return environment_risks(logits, batch).mean() + weight * penalty, changes


def gradient_variances(features: Tensor, logits: Tensor, batch: EnvBatch) -> Tensor:
    """Return the variances over examples of the gradients of the linear classifier: [E, C, F + 1], with the bias last.

    The gradient of an example is (p - y) z^T, where p = softmax(logits), y is one-hot, and z has the features followed
    by a 1. Two matrix products therefore give the moments.
    """
    errors = (logits.softmax(-1) - one_hot(batch.y, logits.shape[-1], logits.dtype)).transpose(1, 2)
    inputs = torch.cat([features, torch.ones_like(features[..., :1])], dim=-1)
    share = batch.shares(errors.dtype).unsqueeze(1)
    mean = (errors * share) @ inputs
    return (errors.square() * share) @ inputs.square() - mean.square()


ALGORITHMS.register(
    AlgorithmEntry(
        name="Fishr",
        summary="Match the variances of the classifier's gradients between environments",
        paper="Rame et al., Fishr: invariant gradient variances for out-of-distribution generalization, ICML 2022",
        build=Fishr,
        hparams=(
            Hparam("lambda", 1000.0, LogUniform(10, 1, 4), NON_NEGATIVE),
            *change_step("penalty_anneal_iters", 1500, IntUniform(0, 5000), recipe=(300, IntUniform(0, 1000))),
            Hparam("ema", 0.95, Uniform(0.90, 0.99), BELOW_ONE),
        ),
    )
)
