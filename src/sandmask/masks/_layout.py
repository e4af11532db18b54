"""The form of gradients: one tensor, a sequence of tensors, or tensors by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sandmask.masks._errors import MaskError

Gradients = Tensor | Sequence[Tensor | None] | Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Layout:
    """The form of gradients. Results are returned in the same form, and errors name a tensor."""

    kind: Literal["tensor", "sequence", "mapping"]
    names: tuple[str, ...]

    @classmethod
    def of(cls, grads: Gradients) -> "Layout":
        """Return the form of these gradients."""
        if isinstance(grads, Tensor):
            return cls("tensor", ("gradient",))
        if isinstance(grads, Mapping):
            return cls("mapping", tuple(grads))
        if isinstance(grads, Sequence) and not isinstance(grads, str):
            return cls("sequence", tuple(f"gradient {i}" for i in range(len(grads))))
        raise MaskError(
            "Parameter `grads` should be a tensor, a sequence of tensors or a dict of tensors. "
            f"Found `grads` of type {type(grads).__name__}."
        )

    def flatten(self, grads: Gradients) -> list[Tensor | None]:
        """Return the tensors of gradients in the order of this form. Raise an error if they have another form."""
        found = Layout.of(grads)
        if found.kind != self.kind or len(found.names) != len(self.names):
            raise MaskError(f"Every environment should have gradients of the same form, {self}. Found {found}.")
        if isinstance(grads, Tensor):
            return [grads]
        if not isinstance(grads, Mapping):
            return list(grads)
        if missing := set(self.names) - set(found.names):
            raise MaskError(f"Every environment should have gradients of the same names. Missing: {sorted(missing)}.")
        return [grads[name] for name in self.names]

    def restore(self, values: Sequence[Any]) -> Any:
        """Return values, one per tensor, in this form."""
        if self.kind == "tensor":
            return values[0]
        return list(values) if self.kind == "sequence" else dict(zip(self.names, values, strict=True))

    def describe(self, index: int) -> str:
        """Return the name of the tensor at `index` for an error message."""
        name = self.names[index]
        if self.kind != "mapping":
            return f"The {name}"
        # A name with spaces is already a description: "parameter 3 of shape (2, 4)".
        return f"The gradient of {name}" if " " in name else f"The gradient of `{name}`"

    def __str__(self) -> str:
        return "one tensor" if self.kind == "tensor" else f"a {self.kind} of {len(self.names)} tensors"


def check_kind(layout: Layout, index: int, grad: Tensor) -> None:
    """Raise an error unless the gradient is a dense tensor of real floating-point numbers."""
    if not isinstance(grad, Tensor):
        raise MaskError(f"{layout.describe(index)} should be a tensor or None. Found {type(grad).__name__}.")
    if not grad.dtype.is_floating_point:
        raise MaskError(f"{layout.describe(index)} should be of a real floating-point dtype. Found {grad.dtype}.")
    if grad.layout is not torch.strided:
        raise MaskError(
            f"{layout.describe(index)} should be dense. Found layout {grad.layout}. "
            "Create the module with sparse=False, or do not pass its parameters."
        )
