"""The discriminator of environments that DANN and CDANN train, and their hyperparameters."""

import torch
from torch import Tensor, nn

from sandmask.functional.dropout import Dropout
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


def one_hot(labels: Tensor, n: int) -> Tensor:
    """Labels [...] as float32 rows [..., n]."""
    return (labels.unsqueeze(-1) == torch.arange(n, device=labels.device)).to(torch.float32)
