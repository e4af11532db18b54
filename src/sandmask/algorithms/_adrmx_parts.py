"""The networks and losses beside ADRMX's featurizers: heads, discriminator, contrast and remix."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms._base import cross_entropy
from sandmask.algorithms._pairs import pairs_of
from sandmask.functional import random
from sandmask.functional.batch import EnvBatch

TEMPERATURE, EPSILON = 0.07, 1e-5


class NonlinearHeads(nn.Module):
    """Three classifiers F - F/2 - F/4 - out with ReLUs: "label", "difference" (of classes) and "domain".

    A layer is no narrower than the output.
    """

    def __init__(self, n_features: int, n_classes: int, n_envs: int) -> None:
        super().__init__()
        outs = {"label": n_classes, "difference": n_classes, "domain": n_envs}
        self.heads = nn.ModuleDict({name: _head(n_features, out) for name, out in outs.items()})

    def forward(self, which: str, x: Tensor) -> Tensor:
        """Logits by one of them."""
        logits: Tensor = self.heads[which](x)
        return logits


def _head(n_features: int, n_out: int) -> nn.Sequential:
    half, quarter = max(n_features // 2, n_out), max(n_features // 4, n_out)
    layers = nn.Linear(n_features, half), nn.ReLU(), nn.Linear(half, quarter), nn.ReLU(), nn.Linear(quarter, n_out)
    return nn.Sequential(*layers)


def contrast(features: Tensor, batch: EnvBatch) -> Tensor:
    """S: every example's mean over others j of its class of -log(q_ij + 1e-5), summed, over their number plus 1.

    q_ij = e_ij / (sum_(k != i) e_ik + 2e-5), e_ij = exp(cos(z_i, z_j) / 0.07): the published weight of 1/2 on pairs
    within an environment, and of 1/2 on the others, cancels but for the constant.
    """
    pairs = pairs_of(batch)
    positive = pairs.other & pairs.same_class
    unit = F.normalize(features, dim=-1)
    exponentials = torch.where(pairs.other, torch.exp(unit @ unit.T / TEMPERATURE), 0.0)
    share = exponentials / (exponentials.sum(-1, keepdim=True) + 2.0 * EPSILON)
    counts = positive.sum(-1)
    means = torch.where(positive, -torch.log(share + EPSILON), 0.0).sum(-1) / counts.clamp_min(1)
    return means.sum() / ((counts > 0).sum() + 1)


def pairs_of_classes(batch: EnvBatch, n_classes: int, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each class two random examples of it, numbered as in `batch.inputs`, and whether it has two: [C] each."""
    classes = torch.arange(n_classes, device=key.device).unsqueeze(-1)
    member = (batch.y.flatten() == classes) & (batch.weight.flatten() > 0)
    noise = random.uniform(random.fold(batch.example_keys.flatten(), key))
    order = torch.where(member, noise, 2.0).argsort(stable=True)
    last = min(1, order.shape[-1] - 1)
    return order[:, 0], order[:, last], member.sum(-1) >= 2


def masked_mean_loss(losses: Tensor, counts: Tensor) -> Tensor:
    """The sum of the classes' losses that count, divided by the number of classes."""
    return torch.where(counts, losses, 0.0).mean()


def environment_loss(logits: Tensor, batch: EnvBatch) -> Tensor:
    """The cross-entropy of the environments' numbers, of logits [N, E]."""
    return batch.mean(cross_entropy(batch.split(logits), batch.environments)).mean()
