"""A module whose parameters are one flat vector, which is passed as an argument.

With a flat vector, the optimizer and the masks need few kernels for any model, and the parameters of K runs are one
matrix `[K, P]`. The gradient is also one vector, because the backward pass of `split` is one `cat`.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

Params = dict[str, Tensor]

BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Slot:
    """The position and layout of a parameter in the flat vector."""

    name: str
    shape: torch.Size
    numel: int
    channels_last: bool = False  # [out, in, height, width] is stored as [out, height, width, in]

    def read(self, piece: Tensor) -> Tensor:
        """Return the parameter as a view of its piece of the vector."""
        if not self.channels_last:
            return piece.view(self.shape)
        n_out, n_in, height, width = self.shape
        return piece.view(n_out, height, width, n_in).permute(0, 3, 1, 2)

    def write(self, value: Tensor, leading: int = 0) -> Tensor:
        """Return the piece of the vector for a value of the parameter. The first `leading` dimensions stay."""
        return (value.movedim(-3, -1) if self.channels_last else value).flatten(leading)


class FlatModule:
    """A module as a pure function of `(parameters, inputs)`.

    `build` creates the module. It is called once for the layout, and once for each run's initial parameters.
    Buffers (frozen batch-norm statistics) and parameters without gradients are constants of the function.

    For computing, parameters and constants are cast to `dtype`. The vector, its gradient and the modules of the types
    in `exact` are not cast. Batch-norm is exact, because its kernels accept float32 parameters for inputs of lower
    precision, and a rounded scale would change a whole channel. Exact parameters are at the end of the vector, so that
    one kernel casts all others.

    If the attribute `memory_format` of a module is `torch.channels_last`, the weights of its convolutions are stored in
    this order, so that they need not be reordered at each step.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        dtype: torch.dtype = torch.float32,
        exact: tuple[type[nn.Module], ...] = BATCH_NORM,
    ) -> None:
        self._build = build
        self.dtype = dtype
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # random constants should be the same in all runs, and when a run is resumed
            module = build()
        kept = set(_names_in(module, exact))
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        order = sorted(parameters, key=kept.__contains__)  # the sort is stable and keeps the order of the module
        last = set(_channels_last_names(module))
        self.slots = tuple(Slot(name, parameters[name].shape, parameters[name].numel(), name in last) for name in order)
        self.numel = sum(slot.numel for slot in self.slots)
        self._n_cast = sum(slot.name not in kept for slot in self.slots)
        constants: dict[str, Tensor] = {n: p for n, p in module.named_parameters() if not p.requires_grad}
        constants |= dict(module.named_buffers())
        self.constants = {
            name: value.detach() if name in kept else self._cast(value.detach()) for name, value in constants.items()
        }
        self.skeleton = _skeleton(module)

    @property
    def stacks(self) -> bool:
        """Whether `torch.func.vmap` can be used: not with channels-last, and not with batch-norm below float32."""
        if any(slot.channels_last for slot in self.slots):
            return False
        return self.dtype == torch.float32 or not any(isinstance(m, BATCH_NORM) for m in self.skeleton.modules())

    def _cast(self, value: Tensor) -> Tensor:
        """Cast a value for computing. With float32, nothing is cast, so that float64 vectors stay float64."""
        return value.to(self.dtype) if self.dtype != torch.float32 and value.is_floating_point() else value

    def to(self, device: torch.device) -> Self:
        """Move the constants to a device. The caller moves the parameters."""
        self.constants = {name: value.to(device) for name, value in self.constants.items()}
        return self

    def init(self, seed: int) -> Tensor:
        """Return initial parameters, as PyTorch initializes the module after `torch.manual_seed(seed)`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self._build()
        return self.flatten({name: p.detach() for name, p in module.named_parameters()})

    def flatten(self, named: Mapping[str, Tensor]) -> Tensor:
        """Return the flat vector of parameters by name: the inverse of `named`."""
        return torch.cat([slot.write(named[slot.name]) for slot in self.slots])

    def flatten_each(self, named: Mapping[str, Tensor]) -> Tensor:
        """Return flat vectors [E, P], at least in float32, of E values of every parameter, [E, *shape] by name."""
        pieces = [slot.write(named[slot.name], leading=1) for slot in self.slots]
        return torch.cat([piece.to(torch.promote_types(piece.dtype, torch.float32)) for piece in pieces], dim=1)

    def join_each(self, named: Mapping[str, Sequence[Tensor] | Tensor]) -> list[Tensor]:
        """Return consecutive parts [E, n] of flat vectors [E, P]. Adjacent parameters of one dtype are one part.

        :param named: E values of every parameter by name, as [E, *shape] or as a list.
        """
        parts: list[Tensor] = []
        for _, alike in groupby(self.slots, key=lambda slot: named[slot.name][0].dtype):
            slots = list(alike)
            n_envs = len(named[slots[0].name])
            pieces = [slot.write(named[slot.name][e]) for e in range(n_envs) for slot in slots]
            parts.append(torch.cat(pieces).view(n_envs, -1))
        return parts

    def named(self, vector: Tensor) -> Params:
        """Return the parameters by name, as views of the vector with its dtype. Model files store these."""
        return dict(self._read(self.slots, vector))

    def unflatten(self, vector: Tensor) -> Params:
        """Return the parameters by name, for computing: views of the vector, or of the vector cast to `dtype`."""
        if self.dtype == torch.float32:
            return self.named(vector)
        cast, kept = self.slots[: self._n_cast], self.slots[self._n_cast :]
        lower, exact = torch.split(vector, [sum(slot.numel for slot in slots) for slots in (cast, kept)])
        return {**dict(self._read(cast, self._cast(lower))), **dict(self._read(kept, exact))}

    @staticmethod
    def _read(slots: tuple[Slot, ...], vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        pieces = torch.split(vector, [slot.numel for slot in slots])
        return ((slot.name, slot.read(piece)) for slot, piece in zip(slots, pieces, strict=True))

    def __call__(self, params: Params, *args: object, **kwargs: object) -> Tensor:
        """Return the module's output for these parameters."""
        out: Tensor = self.call(params, *args, **kwargs)
        return out

    def call(self, params: Params, *args: object, **kwargs: object) -> Any:
        """Return the module's output, which may be more than one tensor."""
        return functional_call(self.skeleton, {**self.constants, **params}, args, kwargs)


def _skeleton(module: nn.Module) -> nn.Module:
    """The module without values. A tensor with several names, such as a tied weight, stays one tensor."""
    skeleton = copy.deepcopy(module).to("meta")  # this creates a separate tensor for each name
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        first: dict[int, str] = {}
        for name, value in named(module, remove_duplicate=False):
            twin = first.setdefault(id(value), name)
            if twin != name:
                (owner, _, own), (other, _, its) = name.rpartition("."), twin.rpartition(".")
                setattr(skeleton.get_submodule(owner), own, getattr(skeleton.get_submodule(other), its))
    return skeleton


def _names_in(module: nn.Module, types: tuple[type[nn.Module], ...]) -> Iterator[str]:
    """Yield the names of the parameters and buffers of all modules of these types."""
    for prefix, part in module.named_modules():
        if isinstance(part, types):
            own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            yield from (f"{prefix}.{name}" if prefix else name for name, _ in own)


def _channels_last_names(module: nn.Module) -> Iterator[str]:
    """Yield the names of convolution weights that are stored in the memory format of the module."""
    if getattr(module, "memory_format", torch.contiguous_format) == torch.channels_last:
        convolutions = _names_in(module, (nn.Conv2d,))
        yield from (name for name in convolutions if name.endswith("weight"))
