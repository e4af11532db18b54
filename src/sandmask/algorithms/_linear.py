"""Cross-entropy of linear classifiers in closed form: risks, gradients and products with the Hessian (for TRM)."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from sandmask.algorithms._base import one_hot
from sandmask.functional.batch import EnvBatch


class Heads(NamedTuple):
    """A linear classifier for each environment."""

    weights: Tensor  # [E, C, F]
    biases: Tensor  # [E, C]


class Examples(NamedTuple):
    """The features and labels of each environment's examples."""

    features: Tensor  # [E, B, F]
    onehot: Tensor  # [E, B, C]
    share: Tensor  # [E, B, 1], of an example in its environment's mean

    @classmethod
    def of(cls, features: Tensor, batch: EnvBatch, n_classes: int) -> "Examples":
        """Those of a batch."""
        dtype = features.dtype
        return cls(features, one_hot(batch.y, n_classes, dtype), batch.shares(dtype).unsqueeze(-1))

    def detach(self) -> "Examples":
        """The same as constants."""
        return self._replace(features=self.features.detach())

    def cross_risks(self, heads: Heads) -> Tensor:
        """The risk of environment i by the classifier of Q: [Q, i]."""
        losses = -(self.onehot * F.log_softmax(self._cross_logits(heads), dim=-1)).sum(-1, keepdim=True)
        return (losses * self.share).sum((-2, -1))

    def cross_gradients(self, heads: Heads, alpha: Tensor) -> Tensor:
        """The gradient of sum_i alpha_Qi R_i(w_Q) by the weights of w_Q, for each Q: [E, C, F]."""
        errors = (self._cross_logits(heads).softmax(-1) - self.onehot) * self.share * alpha[..., None, None]
        return errors.flatten(1, 2).mT @ self.features.flatten(0, 1)

    def gradients(self, heads: Heads) -> Heads:
        """The gradient of R_Q(w_Q) by w_Q, for each Q."""
        errors = (self._logits(heads).softmax(-1) - self.onehot) * self.share
        return Heads(errors.mT @ self.features, errors.sum(1))

    def hessian_products(self, heads: Heads, vectors: Tensor) -> Tensor:
        """The Hessian of R_Q(w_Q) by the weights of w_Q, times v_Q, for each Q and v [E, C, F]."""
        shares, change = self._logits(heads).softmax(-1), self.features @ vectors.mT
        errors = shares * (change - (shares * change).sum(-1, keepdim=True)) * self.share
        return errors.mT @ self.features

    def fitted(self, heads: Heads, steps: int, rate: float) -> Heads:
        """The classifiers after some steps of gradient descent, each on its own environment."""
        for _ in range(steps):
            slopes = self.gradients(heads)
            heads = Heads(heads.weights - rate * slopes.weights, heads.biases - rate * slopes.biases)
        return heads

    def _logits(self, heads: Heads) -> Tensor:
        return self.features @ heads.weights.mT + heads.biases.unsqueeze(1)

    def _cross_logits(self, heads: Heads) -> Tensor:
        """[Q, i, B, C]."""
        return self.features @ heads.weights.mT.unsqueeze(1) + heads.biases[:, None, None]
