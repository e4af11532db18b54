"""Tapes: watch the parameters of a forward pass, so that layers compute per-environment gradients.

One backward pass gives the gradients of all layers' inputs; only the gradients of the parameters have to be kept apart
by environment. While a tape is active, the layers in its table are computed by functions whose backward passes give
these gradients to the tape; everything else runs as usual.

`OnePass` keeps the gradients of one run, `functional.tape.MomentTape` folds those of K runs into moments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError


class UnsupportedError(Exception):
    """A parameter is used in a way whose gradient cannot be kept apart by environment."""


def _watched(names: Mapping[int, str], values: Iterable[Any]) -> set[str]:
    """The names of watched tensors in nested arguments. `pytree` would take as long as a small layer does."""
    found: set[str] = set()
    for value in values:
        if id(value) in names:
            found.add(names[id(value)])
        elif isinstance(value, (tuple, list, dict)):
            found |= _watched(names, value.values() if isinstance(value, dict) else value)
    return found


class Tape(TorchFunctionMode):
    """While active, computes the layers that use watched parameters; any other use raises `UnsupportedError`."""

    layers: ClassVar[Mapping[Callable[..., Any], Callable[..., Any]]] = {}
    """For each function that the model may call: the function that computes it, from the tape and the arguments."""

    composites: ClassVar[Mapping[Callable[..., Any], Callable[..., Any]]] = {}
    """For each function that is made of layers: the same computation as calls of these layers."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.watch(params)

    def watch(self, params: Mapping[str, Tensor]) -> Self:
        """Watch these parameters, and no others."""
        self.params = params  # kept alive, because ids are reused
        self.names = {id(param): name for name, param in params.items()}
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute layers by the table; refuse any other use of parameters."""
        kwargs = kwargs or {}
        used = _watched(self.names, (*args, *kwargs.values()))
        return self.use(func, args, kwargs, used) if used else func(*args, **kwargs)

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], used: set[str]) -> Any:
        """Call a function with the watched parameters `used` among its arguments."""
        if func in self.composites:
            with self:
                return self.composites[func](*args, **kwargs)
        if func in self.layers:
            return self.computed(self.layers[func](self, *args, **kwargs), used)
        if getattr(func, "__name__", "") == "__get__":  # reads an attribute, such as `weight.shape`
            found = func(*args, **kwargs)
            if not isinstance(found, Tensor):  # but `weight.T` is the parameter itself, under another id
                return found
        raise self.refusal(func)

    def computed(self, output: Tensor, used: set[str]) -> Tensor:  # noqa: ARG002 - for subclasses
        """Called with the output of each layer and the parameters that it used; returns the output."""
        return output

    def untracked(self) -> str:
        """Why gradients arrived at parameters themselves."""
        return "a parameter is used by a function that cannot be tracked, or outside of the forward pass"

    def refusal(self, func: Callable[..., Any]) -> UnsupportedError:
        """The error for a parameter that a function other than a layer was given."""
        return UnsupportedError(f"a parameter is used by {getattr(func, '__name__', func)}")

    def run(self, losses: Sequence[Tensor] | Tensor, leaves: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """The backward pass, also to `others`. Nothing may arrive at `leaves`: parameters, or what they are views of.

        Something does where a parameter was used out of sight of this mode: in a scripted module, in a custom
        `autograd.Function`, or in a penalty that is part of a loss.
        """
        found = self.differentiate(losses, [*leaves, *others])
        if any(grad is not None for grad in found[: len(leaves)]):
            raise UnsupportedError(self.untracked())

    def differentiate(
        self,
        losses: Sequence[Tensor] | Tensor,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor] | None = None,
        *,
        retain_graph: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad`, with None for what is not reached."""
        try:
            return torch.autograd.grad(losses, inputs, gradients, allow_unused=True, retain_graph=retain_graph)
        except RuntimeError as error:
            if isinstance(error, CheckpointError) or "use_reentrant=True" in str(error):
                raise UnsupportedError("a layer is inside of `torch.utils.checkpoint`") from error
            raise


class NoParameters(Tape):
    """While active, any use of the parameters raises `UnsupportedError`."""

    def refusal(self, func: Callable[..., Any]) -> UnsupportedError:  # noqa: ARG002
        """See `Tape.refusal`."""
        return UnsupportedError("something uses the model's parameters other than as its attributes")
