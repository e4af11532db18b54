"""The discriminator of environments that DANN, CDANN and ADRMX train, and its hyperparameters."""

import torch
from torch import Tensor, nn

from sandmask.algorithms._base import Hparams, Problem
from sandmask.functional import random
from sandmask.functional.adam import AdamState, adam_step, adam_where
from sandmask.functional.batch import EnvBatch
from sandmask.functional.dense import Dropout
from sandmask.hparams import BELOW_ONE, COUNT, DEPTH, NON_NEGATIVE, Choice, Hparam, IntLogUniform, Like, LogUniform
from sandmask.networks import MLP

HPARAMS = (
    Hparam("lambda", 1.0, LogUniform(10, -2, 2), NON_NEGATIVE),
    Hparam("weight_decay_d", 0.0, LogUniform(10, -6, -2), NON_NEGATIVE),
    Hparam("d_steps_per_g_step", 1, IntLogUniform(2, 0, 3), COUNT),
    Hparam("grad_penalty", 0.0, LogUniform(10, -2, 1), NON_NEGATIVE),
    Hparam("beta1", 0.5, Choice(0.0, 0.5), BELOW_ONE),
    # The discriminator's. On Spirals, whose network is an MLP too, both have the same width and depth.
    Hparam("mlp_width", 256, IntLogUniform(2, 6, 10), COUNT),
    Hparam("mlp_depth", 3, Choice(3, 4, 5), DEPTH),
    Hparam("mlp_dropout", 0.0, Choice(0.0, 0.1, 0.5), BELOW_ONE),
    Like("lr_g", "lr"),
    Like("lr_d", "lr"),
    Like("weight_decay_g", "weight_decay"),
)


_NOISE = 1000  # the discriminator's dropout: a stream apart from the network's


def discriminator_dropout(problem: Problem, batch: EnvBatch, hparams: Hparams) -> Dropout | None:
    """The dropout noise of the discriminator."""
    if not problem.dropout or "mlp_dropout" not in hparams:
        return None
    return Dropout(hparams["mlp_dropout"], random.fold(batch.example_keys.flatten(), _NOISE))


def step_where(
    when: Tensor, params: Tensor, gradient: Tensor, adam: AdamState, hparams: Hparams
) -> tuple[Tensor, AdamState]:
    """A step of Adam with betas (beta1, 0.9) where `when` is true; elsewhere nothing changes."""
    lr, weight_decay, betas = hparams["lr"], hparams["weight_decay"], (hparams["beta1"], 0.9)
    decoupled = hparams.get("decoupled_decay", 0.0)
    moved, stepped = adam_step(params, gradient, adam, lr, weight_decay, betas, decoupled)
    return torch.where(when, moved, params), adam_where(when, stepped, adam)


class Discriminator(nn.Module):
    """Logits of the environment, from features; with `n_classes`, also an embedding for each class."""

    def __init__(self, n_features: int, n_envs: int, n_classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.mlp = MLP(n_features, width, depth, n_envs)
        if n_classes:
            self.embedding = nn.Parameter(torch.randn(n_classes, n_features))

    def forward(self, part: str, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """The part "embedding" of one-hot labels, or the "logits" of inputs."""
        if part == "embedding":
            return x.to(self.embedding.dtype) @ self.embedding
        logits: Tensor = self.mlp(x, drop)
        return logits
