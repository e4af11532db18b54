"""Parameters that are used outside of layers.

- A tensor that is computed from parameters alone (`weight.T`, a weight-normed weight, a table of relative positions) is
  watched like a parameter. At the end, its gradients are passed on to the parameters.
- A parameter that is added to the examples, or multiplied with them, becomes a tensor with a row for each example.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.gradients._layers import MARK
from sandmask.gradients._tape import UnsupportedError

if TYPE_CHECKING:
    from sandmask.gradients._one_pass import OnePass


class Computed:
    """Tensors that were computed from parameters alone, and their gradients `[E, *shape]`.

    :param model: its buffers and frozen parameters may be used in such computations.
    """

    def __init__(self, model: nn.Module) -> None:
        self._constants = {id(tensor) for tensor in (*model.buffers(), *model.parameters())}
        self._tensors: dict[str, Tensor] = {}
        # Layers get these tensors instead. Otherwise, the backward pass would continue to the parameters.
        self._detached: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}  # versions of the tensors when layers used them
        self._gradients: dict[str, Tensor] = {}
        self._sources: dict[str, set[str]] = {}

    def use(
        self, tape: "OnePass", func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], used: set[str]
    ) -> Any:
        """Call a function with the watched tensors `used`. Return NotImplemented if it is a layer, or not supported.

        Tensors without gradients may be part of a computation from parameters, unless they have a row for each example.
        """
        values = (*args, *kwargs.values())
        x = next(tensors_of(values))
        of_examples = func in tape.layers and tape.holds_examples(x.shape)
        if of_examples and x.requires_grad and id(x) not in tape.names:  # as of most layers
            return NotImplemented
        if func not in _ALSO_ALONE and self._alone(tape, values, strictly=True):
            return self._compute(tape, func, args, kwargs, used)
        if of_examples:
            return NotImplemented
        alone = self._alone(tape, values, strictly=False)
        if func in _USES and not (func in _POSITIONAL and kwargs):
            try:
                return _USES[func](tape, *args, **kwargs)
            except UnsupportedError:
                if not alone:
                    raise
        return self._compute(tape, func, args, kwargs, used) if alone else NotImplemented

    def _alone(self, tape: "OnePass", values: Iterable[Any], *, strictly: bool) -> bool:
        """Whether all tensors in the arguments are watched or constants; `strictly`, the model's own or indices."""

        def constant(tensor: Tensor) -> bool:
            if tensor.requires_grad or id(tensor) in self._constants:
                return not tensor.requires_grad
            number = tensor.is_floating_point() or tensor.is_complex()
            return tensor.shape[:1] != (tape.n_examples,) and not (strictly and number)

        return all(id(tensor) in tape.names or constant(tensor) for tensor in tensors_of(values))

    def _compute(
        self, tape: "OnePass", func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], used: set[str]
    ) -> Any:
        found = func(*args, **kwargs)
        self.watch(tape.names, [found, *args], used)  # an argument, if the function wrote to it
        return found

    def watch(self, names: dict[int, str], found: Any, used: set[str]) -> None:
        """Give names to the tensors that were computed from those in `used`."""
        for tensor in tensors_of([found]):
            if tensor.requires_grad and id(tensor) not in names:
                name = f"computed {len(self._tensors)}"
                self._tensors[name], self._detached[id(tensor)] = tensor, tensor.detach().requires_grad_()
                names[id(tensor)] = names[id(self._detached[id(tensor)])] = name
                self._sources[name] = self.sources(used)

    def detached(self, value: Any) -> Any:
        """The tensor to pass to a layer instead of an argument."""
        found = self._detached.get(id(value))
        if found is None:
            return value
        if self._versions.setdefault(id(value), value._version) != value._version:  # noqa: SLF001
            raise UnsupportedError(_CHANGED)
        return found

    def leaves(self) -> list[Tensor]:
        """The tensors to which a backward pass has to compute gradients."""
        return list(self._detached.values())

    def sources(self, used: Iterable[str]) -> set[str]:
        """The names of the parameters among `used`, and of those from which the others were computed."""
        return {source for name in used for source in self._sources.get(name, {name})}

    def add(self, name: str, gradients: Tensor) -> None:
        """Add gradients of a computed tensor."""
        sum_so_far = self._gradients.get(name)
        self._gradients[name] = gradients if sum_so_far is None else sum_so_far + gradients

    def passed_on(self, tape: "OnePass") -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the name of each parameter and its gradients, one per environment."""
        if not self._gradients:
            return
        outputs, leaves = [self._tensors[name] for name in self._gradients], list(tape.params.values())
        if any(self._versions[id(tensor)] != tensor._version for tensor in outputs):  # noqa: SLF001
            raise UnsupportedError(_CHANGED)
        each = [
            tape.differentiate(outputs, leaves, of_one, retain_graph=True)
            for of_one in zip(*self._gradients.values(), strict=True)
        ]
        for name, found in zip(tape.params, zip(*each, strict=True), strict=True):
            if found[0] is not None:
                yield name, list(found)


_CHANGED = "a tensor that was computed from a parameter is changed in place after its use"


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in nested arguments or results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from tensors_of(value.values() if isinstance(value, dict) else value)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: "OnePass", param: Tensor, rows: int, ndim: int) -> Tensor:
        ctx.tape, ctx.param = tape, param
        ctx.save_for_backward(MARK)
        return param[(None,) * (ndim - param.ndim)].expand(rows, *[-1] * (ndim - 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tape, param = ctx.tape, ctx.param
        _ = ctx.saved_tensors
        tape.add(param, lambda: tape.sums(grad, ()).reshape(len(tape.sizes), *param.shape))
        return None, None, None, None


def _rows(tape: "OnePass", param: Tensor, shape: Sequence[int]) -> Tensor:
    """A watched tensor as rows, one for each example, to be broadcast to this shape."""
    if not _for_examples(tape, param, shape):
        raise UnsupportedError(f"a parameter of shape {tuple(param.shape)} is broadcast to {tuple(shape)}")
    rows: Tensor = _Rows.apply(tape, tape.detached(param), shape[0], len(shape))  # type: ignore[no-untyped-call]
    return tape.computed(rows, {tape.names[id(param)]})


def _broadcast(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that broadcasts its arguments, with rows instead of parameters."""

    def of_rows(tape: "OnePass", *args: Any, **kwargs: Any) -> Any:
        others = [x for x in tensors_of((*args, *kwargs.values())) if id(x) not in tape.names]
        shape = max((x.shape for x in others), key=lambda shape: (len(shape), shape[:1]), default=torch.Size())

        def of(x: Any) -> Any:
            if id(x) not in tape.names:
                return x
            # A 0-dimensional tensor does not determine the dtype of the result.
            return _rows(tape, x, shape) if x.ndim > 0 else _rows(tape, x, shape).to(torch.result_type(x, others[0]))

        return func(*map(of, args), **{name: of(x) for name, x in kwargs.items()})

    return of_rows


def _expand(tape: "OnePass", param: Tensor, *sizes: Any, **named: Any) -> Any:
    """`Tensor.expand` of a parameter, which becomes rows if the result has one row for each example."""
    shape = _shape(*sizes, *named.values())
    if shape[0] != tape.n_examples or not _for_examples(tape, param, shape):
        return tape.watch_computed(param.expand(shape), param)
    return _rows(tape, param, shape).expand(shape)


def _repeat(tape: "OnePass", param: Tensor, *sizes: Any, **named: Any) -> Any:
    """`Tensor.repeat` of a parameter, which may have several rows for each example, such as heads of attention."""
    times = _shape(*sizes, *named.values())
    if times[0] != tape.n_examples:
        return tape.watch_computed(param.repeat(times), param)
    return _rows(tape, param, (*times[:1], *times)).flatten(0, 1).repeat(1, *times[1:])


def _for_examples(tape: "OnePass", param: Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor may be broadcast to this shape, with the same row for all examples."""
    one_row = param.ndim < len(shape) or (param.ndim == len(shape) and param.shape[:1] == (1,))
    return one_row and tape.holds_examples(shape)


def _shape(*sizes: Any) -> list[int]:
    return list(sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes)


def _expand_as(tape: "OnePass", param: Tensor, other: Tensor) -> Any:
    return _expand(tape, param, *other.shape)


def _matmul(tape: "OnePass", x: Tensor, weight: Tensor) -> Tensor:
    """`torch.matmul`, computed as a linear layer, or with one matrix per example."""
    if min(x.ndim, weight.ndim) < 2 or (id(x) in tape.names and weight.ndim < 3):
        raise UnsupportedError("a parameter is used by matmul with a vector, or multiplied with a matrix")
    if id(x) in tape.names or weight.ndim > 2:
        product: Tensor = _broadcast(torch.matmul)(tape, x, weight)
        return product
    with tape:
        return F.linear(x, weight.mT)


def _addmm(tape: "OnePass", bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if id(x) in tape.names or bias.ndim != 1:
        raise UnsupportedError("a parameter is used by addmm, but not as a linear layer does")
    with tape:
        return F.linear(x, weight.mT, bias)


def _masked_fill(tape: "OnePass", x: Tensor, mask: Tensor, value: Any) -> Tensor:
    with tape:
        return torch.where(mask, value, x).to(x.dtype)


def _prelu(tape: "OnePass", x: Tensor, weight: Tensor) -> Tensor:
    with tape:
        return torch.where(x > 0, x, x * weight.view(-1, *[1] * (x.ndim - 2)))


def _rms_norm(
    tape: "OnePass",
    input: Tensor,  # noqa: A002
    normalized_shape: list[int],
    weight: Tensor,
    eps: float | None = None,
) -> Tensor:
    with tape:
        return F.rms_norm(input, normalized_shape, None, eps) * weight


_ARITHMETIC = ("add", "sub", "mul", "div", "true_divide", "pow", "addcmul", "lerp", "where", "maximum", "minimum")
_ELEMENTWISE = (*_ARITHMETIC, "lt", "le", "gt", "ge", "eq", "ne")
_IN_TENSOR = ("add_", "sub_", "mul_", "div_", "__rsub__", "__rdiv__", "__pow__", "__rpow__")

# Functions that are not layers -> the same computation by layers or by rows. The replacements also take the tape.
_BROADCAST: dict[Callable[..., Any], Callable[..., Any]] = {
    function: _broadcast(function)
    for function in (
        *(getattr(torch, name) for name in _ELEMENTWISE),
        *(getattr(Tensor, name) for name in (*_ELEMENTWISE, *_IN_TENSOR)),
        F.scaled_dot_product_attention,
    )
}
_POSITIONAL: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm), _matmul),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    **dict.fromkeys((torch.masked_fill, Tensor.masked_fill), _masked_fill),
    torch.prelu: _prelu,
}
_USES: dict[Callable[..., Any], Callable[..., Any]] = {
    **_BROADCAST,
    **_POSITIONAL,
    Tensor.expand: _expand,
    Tensor.expand_as: _expand_as,
    Tensor.repeat: _repeat,
    F.rms_norm: _rms_norm,
}
# The functions in `_USES` whose result may have a row for each example, even if all arguments are parameters.
_ALSO_ALONE = (Tensor.expand, Tensor.repeat)
