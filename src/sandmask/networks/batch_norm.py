"""Batch-norm that is not frozen: it uses minibatch statistics in training, and running averages in evaluations.

The running averages are in the network's vector of parameters, so that they are saved, averaged and evaluated like
weights. Their gradient is zero, and `Network.tracked` updates them after each step.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sandmask.errors import SandmaskError
from sandmask.functional.flat import BATCH_NORM

RUNNING = ("running_mean", "running_var")


class Statistics(NamedTuple):
    """The statistics of a minibatch in one layer, and their weight in the running averages."""

    mean: Tensor
    variance: Tensor
    momentum: float


class BatchStatistics(TorchFunctionMode):
    """Within this context, batch-norm normalizes by the statistics of its inputs.

    With `keep`, `seen` has these statistics by the `id` of the running mean that a layer was called with.
    """

    def __init__(self, *, keep: bool = False) -> None:
        super().__init__()
        self.keep = keep
        self.seen: dict[int, Statistics] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        return self._normalized(*args, **(kwargs or {}))

    def _normalized(
        self,
        input: Tensor,  # noqa: A002 - the signature of `F.batch_norm`
        running_mean: Tensor,
        running_var: Tensor,  # noqa: ARG002
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,  # noqa: ARG002
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if self.keep:
            variance, mean = torch.var_mean(input.float(), dim=[0, *range(2, input.ndim)])
            self.seen[id(running_mean)] = Statistics(mean, variance, momentum)
        return F.batch_norm(input, None, None, weight, bias, True, 0.0, eps)


def unfreeze(model: nn.Module, name: str) -> None:
    """Turn the running averages of a model's batch-norm layers into parameters. `name` is its name in messages."""
    layers = [part for part in model.modules() if isinstance(part, BATCH_NORM)]
    if not layers:
        raise SandmaskError(f"freeze_bn=0 is for networks with batch-norm. The network {name!r} has none.")
    for layer in layers:
        for running in RUNNING:
            value = getattr(layer, running)
            delattr(layer, running)
            layer.register_parameter(running, nn.Parameter(value))
