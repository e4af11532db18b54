"""Access the tensors of all K runs from a function of one run under `vmap`, for kernels that process all runs.

`vmap` turns every operation of one run into an operation of K runs. A kernel that replaces several operations takes the
tensors of all runs at once, with K as the leading dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# torch has no public function that tells whether a transform of `torch.func` is active. If a version lacks these, we
# assume that one is active: results are the same, but slower.
try:
    from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack
except ImportError:
    _CAN_ASK = False
else:
    _CAN_ASK = True

Kernel = Callable[..., tuple[Tensor, ...]]

_tracing = False


@contextmanager
def tracing() -> Iterator[None]:
    """Within this context, operations are recorded. Kernels are not used, because they would not be recorded."""
    global _tracing  # noqa: PLW0603 - tracing is a state of the process
    before, _tracing = _tracing, True
    try:
        yield
    finally:
        _tracing = before


def is_traced() -> bool:
    """Whether operations are being recorded or compiled."""
    return _tracing or torch.compiler.is_compiling()


def in_transform() -> bool:
    """Whether a transform of `torch.func`, such as `vmap` or `grad`, is active, or may be."""
    return not _CAN_ASK or peek_interpreter_stack() is not None


def in_vmap() -> bool:
    """Whether one level of `vmap` is active, and no other transform."""
    stack = (get_interpreter_stack() or []) if _CAN_ASK else []
    return len(stack) == 1 and bool(stack[0].key() == TransformType.Vmap)


def reachable() -> bool:
    """Whether the tensors of all runs can be reached: under one level of `vmap`, or outside of all transforms."""
    return in_vmap() or not in_transform()


def on_all_runs(kernel: Kernel, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Call `kernel` with the tensors of all K runs from a function of one run; not differentiable.

    K is the leading dimension, and 1 outside of `vmap`. Tensors that the runs share are expanded to it.
    """
    outputs: tuple[Tensor, ...] = _OnAllRuns.apply(kernel, *tensors)  # type: ignore[no-untyped-call]
    return outputs


class _OnAllRuns(Function):
    @staticmethod
    def forward(kernel: Kernel, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.squeeze(0) for output in kernel(*(tensor.unsqueeze(0) for tensor in tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], kernel: Kernel, *tensors: Tensor) -> Any:
        outputs = kernel(*leading(info.batch_size, in_dims[1:], tensors))
        return outputs, (0,) * len(outputs)


class RunsFunction(Function):
    """A differentiable function of the tensors of all K runs, which `vmap` over a function of one run calls once."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Call the function with the tensors of all runs. In its outputs, the runs are also the leading dimension."""
        outputs = cls.apply(*leading(info.batch_size, in_dims, args))  # type: ignore[no-untyped-call]
        return outputs, 0 if isinstance(outputs, Tensor) else (0,) * len(outputs)


def apply_to_runs(function: type[Function], tensors: Sequence[Tensor | None], how: Sequence[Any]) -> Tensor:
    """The first output of a function of the tensors of K runs. Outside of `vmap`, the tensors are those of one run."""
    inside = in_vmap()
    given = tensors if inside else [tensor if tensor is None else tensor.unsqueeze(0) for tensor in tensors]
    outputs = function.apply(*given, *how)  # type: ignore[no-untyped-call]
    first: Tensor = outputs if isinstance(outputs, Tensor) else outputs[0]
    return first if inside else first.squeeze(0)


def leading(n_runs: int, dims: tuple[int | None, ...], tensors: tuple[Any, ...]) -> list[Any]:
    """Move the batch dimension of tensors to the front. Shared tensors are expanded; other values stay as they are."""

    def lead(dim: int | None, value: Any) -> Any:
        if not isinstance(value, Tensor) or dim == 0:
            return value
        return value.expand(n_runs, *value.shape) if dim is None else value.movedim(dim, 0)

    return [lead(dim, value) for dim, value in zip(dims, tensors, strict=True)]


def has_kernels(tensor: Tensor) -> bool:
    """Whether GPU kernels can be used for this tensor."""
    if is_traced() or tensor.device.type != "cuda" or tensor.dtype == torch.float64 or not reachable():
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
