"""Parameters that are used outside of layers: computed with, or broadcast to the examples.

What is computed from parameters alone (`weight.T`, a weight-normed weight, a table of relative positions) is watched
like a parameter; its gradients are passed on to the parameters at the end. A parameter that is added to the examples,
or multiplied with them, becomes a tensor with a row for each example.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        # Layers get these in their place: else the backward pass would go on to the parameters.
        self._detached: dict[int, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._sources: dict[str, set[str]] = {}

    def alone(self, names: Mapping[int, str], values: Iterable[Any], examples: int) -> bool:
        """Whether arguments hold no tensors but watched ones, constants, and indices that are not one per example."""

        def index(tensor: Tensor) -> bool:
            return not (tensor.is_floating_point() or tensor.is_complex() or tensor.shape[:1] == (examples,))

        return all(
            id(tensor) in names or (not tensor.requires_grad and (id(tensor) in self._constants or index(tensor)))
            for tensor in _tensors(values)
        )

    def watch(self, names: dict[int, str], found: Any, used: set[str]) -> Any:
        """Give names to the tensors that were computed from those in `used`; return what was found."""
        for tensor in _tensors([found]):
            if tensor.requires_grad and id(tensor) not in names:
                name = f"computed {len(self._tensors)}"
                self._tensors[name], self._detached[id(tensor)] = tensor, tensor.detach().requires_grad_()
                names[id(tensor)] = names[id(self._detached[id(tensor)])] = name
                self._sources[name] = self.sources(used)
        return found

    def detached(self, value: Any) -> Any:
        """What a layer should get in the place of an argument."""
        return self._detached.get(id(value), value)

    def leaves(self) -> list[Tensor]:
        """What a backward pass has to reach."""
        return list(self._detached.values())

    def sources(self, used: Iterable[str]) -> set[str]:
        """The names of the parameters that these are, or were computed from."""
        return {source for name in used for source in self._sources.get(name, {name})}

    def add(self, name: str, gradients: Tensor) -> None:
        """Add gradients of a tensor that is watched here."""
        sum_so_far = self._gradients.get(name)
        self._gradients[name] = gradients if sum_so_far is None else sum_so_far + gradients

    def passed_on(self, params: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
        """Name of a parameter -> the gradients of each environment."""
        if not self._gradients:
            return
        outputs, leaves = [self._tensors[name] for name in self._gradients], list(params.values())
        each = [
            torch.autograd.grad(outputs, leaves, of_one, retain_graph=True, allow_unused=True)
            for of_one in zip(*self._gradients.values(), strict=True)
        ]
        for name, found in zip(params, zip(*each, strict=True), strict=True):
            if found[0] is not None:
                yield name, list(found)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in nested arguments or results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from _tensors(value.values() if isinstance(value, dict) else value)


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
    """A watched tensor that is broadcast to this shape, with its rows."""
    if not _for_examples(tape, param, shape):
        raise UnsupportedError(f"a parameter of shape {tuple(param.shape)} is broadcast to {tuple(shape)}")
    rows: Tensor = _Rows.apply(tape, tape.detached(param), shape[0], len(shape))  # type: ignore[no-untyped-call]
    return tape.computed(rows, {tape.names[id(param)]})


def _broadcast(func: Callable[..., Any]) -> Callable[..., Any]:
    """An elementwise function, with rows in the place of parameters."""

    def of_rows(tape: "OnePass", *args: Any, **kwargs: Any) -> Any:
        others = (x.shape for x in args if isinstance(x, Tensor) and id(x) not in tape.names)
        shape = max(others, key=len, default=torch.Size())
        return func(*[_rows(tape, x, shape) if id(x) in tape.names else x for x in args], **kwargs)

    return of_rows


def _expand(tape: "OnePass", param: Tensor, *sizes: Any) -> Any:
    """It becomes rows if there will be one for each example."""
    shape = _shape(sizes)
    if shape[0] != tape.n_examples or not _for_examples(tape, param, shape):
        return tape.watch_computed(param.expand(*sizes), param)
    return _rows(tape, param, shape).expand(shape)


def _repeat(tape: "OnePass", param: Tensor, *sizes: Any) -> Any:
    """Also of several rows, such as heads of attention, once for each example."""
    times = _shape(sizes)
    if times[0] != tape.n_examples:
        return tape.watch_computed(param.repeat(*sizes), param)
    return _rows(tape, param, (*times[:1], *times)).flatten(0, 1).repeat(1, *times[1:])


def _for_examples(tape: "OnePass", param: Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor may be broadcast to this shape for the examples."""
    one_row = param.ndim < len(shape) or (param.ndim == len(shape) and param.shape[:1] == (1,))
    return one_row and tape.holds_examples(shape)


def _shape(sizes: Any) -> list[int]:
    return list(sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes)


def _expand_as(tape: "OnePass", param: Tensor, other: Tensor) -> Any:
    return _expand(tape, param, *other.shape)


def _matmul(tape: "OnePass", x: Tensor, weight: Tensor) -> Tensor:
    """As a linear layer, or with a matrix for each example."""
    if min(x.ndim, weight.ndim) < 2:
        raise UnsupportedError("a parameter is used by matmul with a vector")
    if id(x) in tape.names or weight.ndim > 2:
        product: Tensor = _broadcast(torch.matmul)(tape, x, weight)
        return product
    with tape:
        return F.linear(x, weight.mT)


def _addmm(tape: "OnePass", bias: Tensor, x: Tensor, weight: Tensor, **scales: Any) -> Tensor:
    if id(x) in tape.names or bias.ndim != 1 or scales:
        raise UnsupportedError("a parameter is used by addmm, but not as a linear layer does")
    with tape:
        return F.linear(x, weight.mT, bias)


def _attention(
    tape: "OnePass",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """With a bias that is a parameter, as those of relative positions are."""
    if attn_mask is None or not {id(query), id(key), id(value)}.isdisjoint(tape.names):
        raise UnsupportedError("a parameter is used by scaled_dot_product_attention, but not as a bias")
    bias = _rows(tape, attn_mask, (*query.shape[:-1], key.shape[-2]))
    return F.scaled_dot_product_attention(query, key, value, bias, *args, **kwargs)


def _rms_norm(
    tape: "OnePass",
    input: Tensor,  # noqa: A002
    normalized_shape: list[int],
    weight: Tensor,
    eps: float | None = None,
) -> Tensor:
    with tape:
        return F.rms_norm(input, normalized_shape, None, eps) * weight


_ELEMENTWISE = ("add", "sub", "mul", "div", "true_divide", "addcmul", "where", "masked_fill")
_IN_TENSOR = (*_ELEMENTWISE, "add_", "sub_", "mul_", "div_", "__rsub__", "__rdiv__")

# For functions that are not layers: the same computation by layers, or by rows. Called with the tape too.
USES: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(torch, name): _broadcast(getattr(torch, name)) for name in _ELEMENTWISE},
    **{getattr(Tensor, name): _broadcast(getattr(Tensor, name)) for name in _IN_TENSOR},
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm), _matmul),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    Tensor.expand: _expand,
    Tensor.expand_as: _expand_as,
    Tensor.repeat: _repeat,
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
}
ALSO_ALONE = (Tensor.expand, Tensor.repeat)
"""Those in `USES` that have rows for examples as their result, though called with parameters alone."""
