"""A module whose parameters are one flat vector that is passed in.

A flat vector keeps the optimizer and the masks at a handful of kernels whatever the model, and K runs are one
`[K, P]` matrix. Gradients with respect to the vector arrive as one vector: the backward of `split` is one `cat`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the flat vector."""

    name: str
    shape: torch.Size
    numel: int


class FlatModule:
    """A module as a pure function of `(parameters, inputs)`.

    `build` makes the module; it is called once for the layout, and once for each run's initial parameters.
    Buffers (frozen batch-norm statistics) are constants of the function.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._build = build
        with torch.random.fork_rng(devices=[]):
            module = build()
        self.buffers = {name: buffer.detach() for name, buffer in module.named_buffers()}
        self.slots = tuple(Slot(name, p.shape, p.numel()) for name, p in module.named_parameters())
        self.numel = sum(slot.numel for slot in self.slots)
        self._skeleton = copy.deepcopy(module).to("meta")

    def to(self, device: torch.device) -> "FlatModule":
        """Move the constants; the parameters are wherever the caller keeps them."""
        self.buffers = {name: buffer.to(device) for name, buffer in self.buffers.items()}
        return self

    def init(self, seed: int) -> Tensor:
        """Initial parameters, as PyTorch initializes the module after `torch.manual_seed(seed)`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self._build()
        return torch.cat([p.detach().reshape(-1) for p in module.parameters()])

    def unflatten(self, vector: Tensor) -> Params:
        """Views of the flat vector, by parameter name."""
        pieces = vector.split([slot.numel for slot in self.slots])
        return {slot.name: piece.view(slot.shape) for slot, piece in zip(self.slots, pieces, strict=True)}

    def __call__(self, params: Params, *args: object, **kwargs: object) -> Tensor:
        """The module's output for these parameters."""
        out: Tensor = functional_call(self._skeleton, {**self.buffers, **params}, args, kwargs)
        return out
