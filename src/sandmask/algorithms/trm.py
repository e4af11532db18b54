"""Transfer risk minimization (Xu et al., 2021)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State, change_step, environment_risks, one_hot
from sandmask.functional import EnvBatch, FlatModule, Params
from sandmask.hparams import NON_NEGATIVE, Hparam, IntLogUniform, LogUniform, seed_hash

INNER_STEPS, INNER_RATE = 30, 0.1
TERMS, LARGEST = 10, 10.0  # of the series for the inverse Hessian: terms after the first, largest entry of the sum


class TRM(ObjectiveAlgorithm):
    """Minimize mean_e R_e + mean_Q [T_Q - cos_lambda u_Q . g_Q]; before step `iters`, only mean_e R_e.

    Each environment Q has its own linear classifier w_Q. At every step, 30 steps of gradient descent fit w_Q to the
    features of Q. T_Q = sum_(i != Q) alpha_Qi R_i(w_Q) is the risk of w_Q on the other environments, g_Q =
    grad_(w_Q) R_Q, and u_Q = H_Q^-1 grad_(w_Q) T_Q counts as a constant, where H_Q is the Hessian of R_Q. Gradients and
    Hessians are with respect to the weights, without the bias. H^-1 v is approximated by sum_k (I - H)^k v for k = 0 to
    10; the sum stops when one of its entries exceeds 10. At every step, the rows of alpha are normalized, and then
    alpha_Qi is multiplied by exp(groupdro_eta alpha_Qi R_i(w_Q)).

    (In DomainBed's code, the series begins with 2 (I - H) v instead of v + (I - H) v.)
    """

    def extra_state(self, seed: int) -> State:
        """Return the classifiers of the environments, and alpha."""
        n_envs, sizes = self.problem.n_envs, (self.network.n_features, self.network.n_classes)
        head = FlatModule(lambda: nn.Linear(*sizes))
        heads = [head.named(head.init(seed_hash(seed, "head", e))) for e in range(n_envs)]
        weights, biases = (torch.stack([named[part] for named in heads]) for part in ("weight", "bias"))
        return {"head_weights": weights, "head_biases": biases, "alpha": 1.0 - torch.eye(n_envs)}

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk, and from step `iters` on also the transfer risks."""
        features = self.features(params, batch, hparams)
        risk = environment_risks(self.network.classify(params, features), batch).mean()
        starts = state["step"] >= hparams["iters"]
        alpha = state["alpha"] / state["alpha"].sum(1, keepdim=True).clamp_min(1e-12)
        examples = Examples.of(features, batch, self.problem.n_classes)
        known = examples.detach()
        heads = known.fitted(Heads(state["head_weights"], state["head_biases"]), INNER_STEPS, INNER_RATE)
        risks = examples.cross_risks(heads)  # [Q, i]
        transfer = (alpha * risks).sum(1)
        along = inverse_hessian(known, heads, known.cross_gradients(heads, alpha))
        alignment = (along * examples.gradients(heads).weights).sum((1, 2))
        penalty = (transfer - hparams["cos_lambda"] * alignment).mean()
        growth = hparams["groupdro_eta"] * alpha * risks.detach()
        # Subtracting the largest value of a row does not change its normalized weights, and keeps exp finite.
        grown = alpha * torch.exp(growth - growth.amax(1, keepdim=True))
        changes = {"head_weights": heads.weights, "head_biases": heads.biases, "alpha": grown}
        kept = {name: torch.where(starts, value, state[name]) for name, value in changes.items()}
        return risk + torch.where(starts, penalty, 0.0), kept


class Heads(NamedTuple):
    """A linear classifier for each environment."""

    weights: Tensor  # [E, C, F]
    biases: Tensor  # [E, C]


class Examples(NamedTuple):
    """The features and labels of each environment's examples. Derivatives of the cross-entropy are in closed form."""

    features: Tensor  # [E, B, F]
    onehot: Tensor  # [E, B, C]
    share: Tensor  # [E, B, 1], the weight of an example in its environment's mean

    @classmethod
    def of(cls, features: Tensor, batch: EnvBatch, n_classes: int) -> "Examples":
        """Return the examples of a batch."""
        dtype = features.dtype
        return cls(features, one_hot(batch.y, n_classes, dtype), batch.shares(dtype).unsqueeze(-1))

    def detach(self) -> "Examples":
        """Return the examples with features that count as constants."""
        return self._replace(features=self.features.detach())

    def cross_risks(self, heads: Heads) -> Tensor:
        """Return the risks of environments i with the classifiers of Q: [Q, i]."""
        losses = -(self.onehot * F.log_softmax(self._cross_logits(heads), dim=-1)).sum(-1, keepdim=True)
        return (losses * self.share).sum((-2, -1))

    def cross_gradients(self, heads: Heads, alpha: Tensor) -> Tensor:
        """Return the gradient of sum_i alpha_Qi R_i(w_Q) with respect to the weights of w_Q, for each Q: [E, C, F]."""
        errors = (self._cross_logits(heads).softmax(-1) - self.onehot) * self.share * alpha[..., None, None]
        return errors.flatten(1, 2).mT @ self.features.flatten(0, 1)

    def gradients(self, heads: Heads) -> Heads:
        """Return the gradient of R_Q(w_Q) with respect to w_Q, for each Q."""
        errors = (self._logits(heads).softmax(-1) - self.onehot) * self.share
        return Heads(errors.mT @ self.features, errors.sum(1))

    def hessian_products(self, heads: Heads, vectors: Tensor) -> Tensor:
        """Return H_Q v_Q for each Q and vectors v [E, C, F], where H_Q is the Hessian with respect to the weights."""
        shares, change = self._logits(heads).softmax(-1), self.features @ vectors.mT
        errors = shares * (change - (shares * change).sum(-1, keepdim=True)) * self.share
        return errors.mT @ self.features

    def fitted(self, heads: Heads, steps: int, rate: float) -> Heads:
        """Return the classifiers after `steps` steps of gradient descent, each on its own environment."""
        for _ in range(steps):
            slopes = self.gradients(heads)
            heads = Heads(heads.weights - rate * slopes.weights, heads.biases - rate * slopes.biases)
        return heads

    def _logits(self, heads: Heads) -> Tensor:
        return self.features @ heads.weights.mT + heads.biases.unsqueeze(1)

    def _cross_logits(self, heads: Heads) -> Tensor:
        """Return the logits of the examples of i with the classifier of Q: [Q, i, B, C]."""
        return self.features @ heads.weights.mT.unsqueeze(1) + heads.biases[:, None, None]


def inverse_hessian(examples: Examples, heads: Heads, vectors: Tensor) -> Tensor:
    """Return the series for H_Q^-1 v_Q, for each environment Q and vectors v [E, C, F]."""
    term, total = vectors, vectors
    goes_on = torch.ones(len(vectors), 1, 1, dtype=torch.bool, device=vectors.device)
    for _ in range(TERMS):
        term = term - examples.hessian_products(heads, term)
        total = torch.where(goes_on, total + term, total)
        goes_on = goes_on & (total.abs().amax((1, 2), keepdim=True) <= LARGEST)
    return total


ALGORITHMS.register(
    AlgorithmEntry(
        name="TRM",
        summary="Learn features on which one environment's best classifier also suits the others",
        paper="Xu and Jaakkola, Learning representations that support robust transfer of predictors, "
        "arXiv:2110.09940, 2021",
        build=TRM,
        hparams=(
            Hparam("cos_lambda", 1e-4, LogUniform(10, -5, 0), NON_NEGATIVE),
            *change_step("iters", 200, IntLogUniform(10, 0, 4), recipe=(40, IntLogUniform(10, 0, 3.3))),
            Hparam("groupdro_eta", 1e-2, LogUniform(10, -3, -1), NON_NEGATIVE),
        ),
    )
)
