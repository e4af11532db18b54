"""Spectral decoupling against its formula."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def test_trains_like_the_naive_objective(
    hparams_of: Callable[..., dict[str, Tensor]], assert_minimizes: Callable[..., None]
) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        x = torch.cat([x for x, _ in minibatches])
        y = torch.cat([y for _, y in minibatches])
        logits = model["classifier"](model["featurizer"](x))
        square = torch.zeros(())
        for row in logits:
            for logit in row:
                square = square + logit**2
        loss: Tensor = F.cross_entropy(logits, y) + 0.8 * square / logits.numel()
        return loss

    assert_minimizes("SD", hparams_of("SD", sd_reg=0.8), naive)
