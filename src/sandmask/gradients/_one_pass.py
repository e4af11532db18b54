"""All environments' gradients from one forward and one backward pass over their concatenated batches.

The gradient with respect to a layer's input is the same whoever asks for it; only the gradient of its weights has to be
kept apart by environment. So the layers that own the parameters (linear, convolution, normalization) are computed by
functions whose backward passes do that, and everything else runs as it always does.

A parameter that is used in any other way raises `UnsupportedError`, and the caller takes the environments one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sandmask._scratch import scratch
from sandmask.masks import TensorMoments, stack_moments

Rows = Sequence[int]  # examples of each environment, in the order of the concatenated batch


class UnsupportedError(Exception):
    """A parameter is used in a way whose gradient cannot be kept apart by environment."""


class NoParameters(TorchFunctionMode):
    """While active, the use of any of `params` raises `UnsupportedError`."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._ids = {id(param) for param in params.values()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function unless it is given a parameter."""
        kwargs = kwargs or {}
        if any(id(leaf) in self._ids for leaf in pytree.tree_leaves((args, kwargs))):
            raise UnsupportedError("something uses the model's parameters other than as its attributes")
        return func(*args, **kwargs)


class OnePass(TorchFunctionMode):
    """While active, layers keep the gradients of `params` apart; after the backward pass, `gradients()` has them.

    With `fold` they are folded into moments as soon as they are there, while a CPU still has them in its cache:
    `moments()` has those. A parameter may then be used once only.

    With `traces` the layers' outputs are kept, and the input that goes through `trace`, for `check_independence`.
    """

    def __init__(self, params: Mapping[str, Tensor], rows: Rows, *, fold: bool = False, traces: bool = False) -> None:
        super().__init__()
        self.folds = fold
        self._traced: list[Tensor] | None = [] if traces else None
        self._records = True
        self._moments: dict[str, TensorMoments] = {}
        self.rows = list(rows)
        self._names = {id(param): name for name, param in params.items()}
        self._params = params
        self._stacks: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute layers in our own way; refuse parameters that turn up anywhere else."""
        kwargs = kwargs or {}
        if func is F.batch_norm and _looks_at_the_batch(*args, **kwargs):  # whether its parameters are watched or not
            raise UnsupportedError("batch-norm in training mode mixes environments")
        if not any(id(leaf) in self._names for leaf in pytree.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        layer = LAYERS.get(func)
        if layer is not None:
            output: Tensor = layer(self, *args, **kwargs)
            if self._traced is not None and output.requires_grad:
                self._traced.append(output)
            return output
        if getattr(func, "__name__", "") == "__get__":  # reads an attribute, such as `weight.shape`
            found = func(*args, **kwargs)
            if not isinstance(found, Tensor):  # but `weight.T` is the parameter itself, under another id
                return found
        raise UnsupportedError(f"a parameter is used by {getattr(func, '__name__', func)}")

    def check_rows(self, x: Tensor) -> None:
        """A layer's input should still have one row an example, or nobody knows whose gradient is whose."""
        if x.ndim < 2 or x.shape[0] != sum(self.rows):
            raise UnsupportedError(f"a layer's input has the shape {tuple(x.shape)}")

    def add(self, param: Tensor | None, stack: Callable[[], Tensor]) -> None:
        """Add gradients `[E, *shape]` of a parameter; a shared one is added to."""
        if param is None or id(param) not in self._names or not self._records:
            return
        name = self._names[id(param)]
        found = stack().to(param.dtype)
        if self.folds:
            if name in self._moments:
                raise UnsupportedError("a parameter is used twice")
            self._moments[name] = stack_moments(found.detach())
            return
        self._stacks[name] = self._stacks[name] + found if name in self._stacks else found

    def by_environment(self, of_rows: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`of_rows` of each environment's rows, stacked."""
        parts = zip(*(torch.split(tensor, self.rows) for tensor in tensors), strict=True)
        found = [of_rows(*part) for part in parts]
        if found[0].is_contiguous():
            return torch.stack(found)
        # Channels last: keep each gradient's order in memory, which is its parameter's.
        return torch.stack([one.permute(0, 2, 3, 1) for one in found]).permute(0, 1, 4, 2, 3)

    def trace(self, x: Tensor) -> Tensor:
        """The model's input, so that it is looked at as well."""
        if self._traced is None or not x.is_floating_point():
            return x
        source = x.detach().requires_grad_()
        self._traced.append(source)
        return source.clone()  # which the model may change in place

    def check_independence(self, loss: Tensor) -> None:
        """Raise if the gradient of the first environment's loss reaches rows of another one, in any layer.

        It does in a model that mixes examples, and in one whose layers see something else than examples in the first
        dimension: as many tokens, perhaps, as there are examples.
        """
        if not self._traced:
            return
        self._records = False
        gradients = torch.autograd.grad(loss, self._traced, retain_graph=True, allow_unused=True)
        self._records, self._traced = True, None
        if any(gradient is not None and bool(gradient[self.rows[0] :].any()) for gradient in gradients):
            raise UnsupportedError("examples do not pass through the model independently of each other")

    def run(self, losses: Sequence[Tensor] | Tensor, leaves: Sequence[Tensor]) -> None:
        """The backward pass. Nothing may arrive at `leaves`, which the parameters are, or are views of.

        Something does where a parameter was used out of sight of this mode: in a scripted module, or in a custom
        `autograd.Function`.
        """
        if any(grad is not None for grad in torch.autograd.grad(losses, leaves, allow_unused=True)):
            raise UnsupportedError("a parameter is used by a function that cannot be watched")

    def moments(self) -> dict[str, TensorMoments]:
        """Name -> moments, of those parameters that were used."""
        return self._moments

    def gradients(self) -> dict[str, Tensor]:
        """Name -> `[E, *shape]`; zeros for parameters that were not used."""
        unused = (name for name in self._params if name not in self._stacks)
        zeros = {name: self._params[name].new_zeros(len(self.rows), *self._params[name].shape) for name in unused}
        return {name: {**self._stacks, **zeros}[name].detach() for name in self._params}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: OnePass, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.tape, ctx.params = tape, (weight, bias)
        x, weight, *rest = _autocast(x, weight, *([] if bias is None else [bias]))
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        tape, (own_weight, own_bias) = ctx.tape, ctx.params
        tape.add(own_weight, lambda: _weight_products(tape, grad, x))
        tape.add(own_bias, lambda: _bias_sums(tape, grad))
        return None, grad @ weight if ctx.needs_input_grad[1] else None, None, None


def _weight_products(tape: OnePass, grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x of each environment: one batched product where all have the same number of rows."""
    if len(set(tape.rows)) > 1:
        return tape.by_environment(lambda g, v: g.flatten(0, -2).T @ v.flatten(0, -2), grad, x)
    n_envs = len(tape.rows)
    grad, x = (t.reshape(n_envs, -1, t.shape[-1]) for t in (grad, x))
    if not tape.folds or grad.device.type != "cpu":
        return torch.bmm(grad.mT, x)
    # Moments are taken of it at once, and then it is forgotten.
    found = scratch("products", (n_envs, grad.shape[2], x.shape[2]), grad.dtype)
    return torch.bmm(grad.mT, x, out=found)


def _bias_sums(tape: OnePass, grad: Tensor) -> Tensor:
    """The sums of each environment's rows."""
    if len(set(tape.rows)) > 1:
        return tape.by_environment(lambda g: g.flatten(0, -2).sum(0), grad)
    return grad.reshape(len(tape.rows), -1, grad.shape[-1]).sum(1)


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: OnePass, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        ctx.tape, ctx.params, ctx.how = tape, (weight, bias), how
        x, weight, *rest = _autocast(x, weight, *([] if bias is None else [bias]))
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, rest[0] if rest else None, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        tape, (own_weight, own_bias) = ctx.tape, ctx.params
        stride, padding, dilation, groups = ctx.how
        how = (None, stride, padding, dilation, False, [0, 0], groups)
        backward = torch.ops.aten.convolution_backward

        def of_weight(g: Tensor, v: Tensor) -> Tensor:
            of_one: Tensor = backward(g, v, weight, *how, [False, True, False])[1]
            return of_one

        tape.add(own_weight, lambda: tape.by_environment(of_weight, grad, x))
        tape.add(own_bias, lambda: tape.by_environment(lambda g: g.sum((0, 2, 3)), grad))
        of_x = backward(grad, x, weight, *how, [True, False, False])[0] if ctx.needs_input_grad[1] else None
        return None, of_x, None, None, None, None, None, None


class _FrozenBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: OnePass, x: Tensor, *own: Any) -> Tensor:
        mean, var, weight, bias, eps = own
        ctx.tape, ctx.params, ctx.eps = tape, (weight, bias), eps
        ctx.save_for_backward(x, mean, var)
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, mean, var = ctx.saved_tensors
        tape, (weight, bias) = ctx.tape, ctx.params
        scale = (var + ctx.eps).rsqrt()
        over = (0, *range(2, x.ndim))
        sums = tape.by_environment(lambda g: g.sum(over, dtype=scale.dtype), grad)
        tape.add(bias, lambda: sums)
        tape.add(weight, lambda: (tape.by_environment(_products(over, scale.dtype), grad, x) - mean * sums) * scale)
        if weight is not None:
            scale = scale * weight
        shape = (1, -1, *([1] * (x.ndim - 2)))
        return None, grad * scale.to(grad.dtype).view(shape), None, None, None, None, None


def _products(over: tuple[int, ...], dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda g, v: (g * v).sum(over, dtype=dtype)


class _Affine(torch.autograd.Function):
    """x * weight + bias along some dimensions: the last part of layer and group normalization."""

    @staticmethod
    def forward(ctx: Any, tape: OnePass, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Any) -> Tensor:
        ctx.tape, ctx.params, ctx.shape = tape, (weight, bias), shape
        ctx.save_for_backward(x, weight)
        scaled = x * weight.view(shape)
        return scaled if bias is None else scaled + bias.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        tape, (own_weight, own_bias) = ctx.tape, ctx.params

        def to_shape(values: Tensor) -> Tensor:
            return values.sum_to_size(ctx.shape).view(own_weight.shape)

        tape.add(own_weight, lambda: tape.by_environment(lambda g, v: to_shape(g * v), grad, x))
        tape.add(own_bias, lambda: tape.by_environment(to_shape, grad))
        return None, grad * weight.view(ctx.shape), None, None, None


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors as autocast would have them: outside of a custom function it does this by itself."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors]


def _linear(tape: OnePass, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # noqa: A002
    tape.check_rows(input)
    return _Linear.apply(tape, input, weight, bias)  # type: ignore[no-untyped-call]


def _conv2d(
    tape: OnePass,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    tape.check_rows(input)
    if isinstance(padding, str):
        raise UnsupportedError(f"a convolution pads in the way {padding!r}")
    how = [[value, value] if isinstance(value, int) else list(value) for value in (stride, padding, dilation)]
    return _Conv2d.apply(tape, input, weight, bias, *how, groups)  # type: ignore[no-untyped-call]


def _looks_at_the_batch(_: Tensor, running_mean: Tensor | None, *__: Any, training: bool = False, **___: Any) -> bool:
    """Whether a call of `batch_norm`, as torch hands it to modes, takes its statistics from the examples."""
    return training or running_mean is None


def _batch_norm(
    tape: OnePass,
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: ARG001 - it is not, or this would not be called
    momentum: float = 0.1,  # noqa: ARG001 - of training mode
    eps: float = 1e-5,
) -> Any:
    tape.check_rows(input)
    return _FrozenBatchNorm.apply(tape, input, running_mean, running_var, weight, bias, eps)  # type: ignore[no-untyped-call]


def _layer_norm(
    tape: OnePass,
    input: Tensor,  # noqa: A002
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    tape.check_rows(input)
    if weight is None:
        raise UnsupportedError("a normalization has a bias without a weight")
    normalized = F.layer_norm(input, normalized_shape, None, None, eps)
    shape = [1] * (input.ndim - len(normalized_shape)) + list(normalized_shape)
    return _Affine.apply(tape, normalized, weight, bias, shape)  # type: ignore[no-untyped-call]


def _group_norm(
    tape: OnePass,
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    tape.check_rows(input)
    normalized = F.group_norm(input, num_groups, None, None, eps)
    shape = [1, input.shape[1]] + [1] * (input.ndim - 2)
    return _Affine.apply(tape, normalized, weight, bias, shape)  # type: ignore[no-untyped-call]


LAYERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    torch.conv2d: _conv2d,
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
}
