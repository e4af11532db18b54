"""RDM against loops over pairs of losses."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MakeHparams = Callable[..., dict[str, Tensor]]


def kernel_mean(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros((), dtype=a.dtype)
    for x in a:
        for y in b:
            for power in range(-4, 4):
                total = total + torch.exp(-(10.0**power) * (x - y) ** 2)
    return total / (len(a) * len(b))


def test_trains_like_loops_over_pairs(hparams_of: MakeHparams, assert_minimizes: Callable[..., None]) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        losses = [
            F.cross_entropy(model["classifier"](model["featurizer"](x)), y, reduction="none") for x, y in minibatches
        ]
        means = [loss.mean() for loss in losses]
        risk = (means[0] + means[1] + means[2]) / 3
        if step < 3:
            return risk
        worst, everyone = losses[max(range(3), key=lambda e: means[e].item())], torch.cat(losses)
        distance = kernel_mean(worst, worst) + kernel_mean(everyone, everyone) - 2 * kernel_mean(worst, everyone)
        return risk + 5.0 * distance + 0.1 * (everyone.var() + worst.var())

    hparams = hparams_of("RDM", rdm_lambda=5, variance_weight=0.1, rdm_penalty_anneal_iters=3, rdm_lr=1e-3)
    assert_minimizes("RDM", hparams, naive, reset_at=3, later_lr=1e-3)
