"""All environments' gradients from one forward and one backward pass over their concatenated batches.

If a parameter is used in an unsupported way, `UnsupportedError` is raised, and the caller processes the environments
one by one.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.gradients._attention import COMPOSITES
from sandmask.gradients._folding import Folding
from sandmask.gradients._independence import IndependenceCheck
from sandmask.gradients._layers import LAYERS
from sandmask.gradients._tape import Tape, UnsupportedError
from sandmask.gradients._uses import Computed, tensors_of
from sandmask.gradients._validator import nodes
from sandmask.masks import MaskError

# For each model, the cases in which its examples were found to be independent of each other. Each case has the layers
# that could not be checked yet, because no gradient arrived there.
_independent: WeakKeyDictionary[nn.Module, dict[object, set[int]]] = WeakKeyDictionary()
_INPUT = -1  # the model's input, among layers

# Functions whose result has a shape, an order or a value that depends on data. A row of a layer may then belong to
# different examples in different passes, although the number of rows is the same.
_SHAPES_OF_DATA = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_pack_padded_sequence"}
_ORDERS_OF_DATA = {"sort", "argsort", "topk", "randperm"}
_NUMBERS_OF_DATA = {"tolist", "item", "numpy", "__array__", "__int__", "__index__"}


class OnePass(Tape):
    """While active, layers keep gradients apart by environment; `gradients()` returns them after the backward pass.

    :param params: parameters by name.
    :param sizes: number of examples of each environment.
    :param fold: fold gradients into moments as soon as they are computed, while they are in the CPU's cache. A
        parameter may then be used only once. After the backward pass, `folding` has the moments.
    :param check: a model and a case, such as the sizes and shapes of its inputs. In the first pass of each case, `run`
        raises an error if examples depend on each other.
    """

    layers = LAYERS
    composites = COMPOSITES

    def __init__(
        self,
        params: Mapping[str, Tensor],
        sizes: Sequence[int],
        *,
        fold: bool = False,
        check: tuple[nn.Module, object] | None = None,
    ) -> None:
        super().__init__(params)
        self.folds = fold
        self.sizes, self.n_examples = list(sizes), sum(sizes)
        self._case: object = None if check is None else check[1]
        self._known: dict[object, set[int]] = {} if check is None else _independent.setdefault(check[0], {})
        self._check = None if check is None else IndependenceCheck(sizes)
        self._of_data = False  # whether shapes or orders depend on data, so that every pass is checked
        self._layers: list[object] = []  # of each computed layer: its parameters, and whether an example is one row
        # Parameters that are used outside of layers. The check detects a first dimension that is not examples.
        self._computed = None if check is None else Computed(check[0])
        self._source: list[Tensor] = []  # the model's input, if it is checked
        self._records = True
        self._running = False
        self._gradients: dict[str, Tensor] = {}
        self._used: set[str] = set()
        self.shares = False  # whether a parameter was used twice

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `Tape`. Batch-norm with batch statistics is refused, even if its parameters are not watched."""
        kwargs = kwargs or {}
        if func is F.batch_norm and _looks_at_the_batch(*args, **kwargs) and id(args[0]) not in self.names:
            raise UnsupportedError("batch-norm in training mode mixes environments")
        self._of_data = self._of_data or _depends_on_data(func, args)
        return super().__torch_function__(func, types, args, kwargs)

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], used: set[str]) -> Any:
        """See `Tape.use`. If examples are checked, parameters may also be used outside of layers."""
        if self._computed is not None and func not in self.composites:
            found = self._computed.use(self, func, args, kwargs, used)
            if found is not NotImplemented:
                return found
            args, kwargs = tuple(map(self.detached, args)), {k: self.detached(v) for k, v in kwargs.items()}
        if func in self.layers:
            x, *own = tensors_of((*args, *kwargs.values()))
            if id(x) in self.names or any(each.requires_grad and id(each) not in self.names for each in own):
                raise UnsupportedError("a layer has a parameter as its input, or a weight that cannot be tracked")
        return super().use(func, args, kwargs, used)

    @property
    def checks(self) -> bool:
        """Whether `run` may check that examples are independent. For this, it needs the loss of every environment."""
        if self._check is None:
            return False
        return bool(self._unknown()) if self._layers else self._case not in self._known

    def _key(self) -> object:
        return self._case, tuple(self._layers)

    def _unknown(self) -> set[int]:
        """The layers that have not been checked: their rows may not belong to single examples."""
        watched = set() if self._check is None else self._check.watched()
        return watched if self._of_data else self._known.get(self._key(), watched)

    def computed(self, output: Tensor, used: set[str]) -> Tensor:
        """Note which parameters were used, and check the output."""
        own = used if self._computed is None else self._computed.sources(used)
        self.shares = self.shares or not own.isdisjoint(self._used)
        self._used |= own
        if self._check is not None and output.grad_fn is not None:
            output.grad_fn.number = len(self._layers)  # type: ignore[attr-defined]
            self._check.watch(output, len(self._layers))
        self._layers.append((frozenset(used), len(output) == self.n_examples))
        return output

    def check_rows(self, x: Tensor) -> None:
        """Check that the rows of a layer's input can be assigned to examples, and their gradients to environments.

        An example may have one row, or several adjacent rows, such as tokens.
        """
        if x.ndim < 2 or not self.holds_examples(x.shape):
            raise UnsupportedError(f"a layer's input has the shape {tuple(x.shape)}")

    def holds_examples(self, shape: Sequence[int]) -> bool:
        """Whether the first dimension may consist of examples."""
        rows, n_examples = shape[0] if shape else 0, self.n_examples
        return rows == n_examples or (self._computed is not None and rows > 0 and rows % n_examples == 0)

    def detached(self, value: Any) -> Any:
        """The tensor to pass to a layer instead of a tensor that was computed from parameters."""
        return value if self._computed is None else self._computed.detached(value)

    def watch_computed(self, found: Tensor, param: Tensor) -> Tensor:
        """Watch a tensor that was computed from a parameter."""
        assert self._computed is not None
        self._computed.watch(self.names, found, {self.names[id(param)]})
        return found

    def add(self, param: Tensor | None, of_environments: Callable[[], Tensor | list[Tensor]]) -> None:
        """Add gradients of a parameter, `[E, *shape]` or a list of E. Gradients of a shared parameter are summed."""
        if not self._running:
            raise MaskError(
                "This forward pass was recorded, and its weights have no gradient in an ordinary backward pass. Call "
                "`recording.backward(losses, mask)`, or compute the loss outside of `sandmask.record`."
            )
        if param is None or id(param) not in self.names or not self._records:
            return
        name, found = self.names[id(param)], of_environments()
        if found[0].shape != param.shape:
            raise UnsupportedError(f"a parameter of shape {tuple(param.shape)} is broadcast by a layer")
        if name in self.params:
            self.keep(name, found, param.dtype)
        elif self._computed is not None:
            gradients = (found if isinstance(found, Tensor) else _stacked(found)).to(param.dtype, copy=self.folds)
            self._computed.add(name, gradients)  # a copy, because layers reuse memory if gradients are folded

    def keep(self, name: str, found: Tensor | list[Tensor], dtype: torch.dtype) -> None:
        """Keep the gradients of a parameter, or fold them."""
        gradients = (found if isinstance(found, Tensor) else _stacked(found)).to(dtype)
        if self.folds:
            self.folding.add(name, gradients.detach())
            return
        self._gradients[name] = self._gradients[name] + gradients if name in self._gradients else gradients

    def each_environment(self, of_rows: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        """Apply `of_rows` to the rows of each environment."""
        rows = len(tensors[0]) // self.n_examples  # of each example
        sizes = self.sizes if rows == 1 else [size * rows for size in self.sizes]
        return [of_rows(*part) for part in zip(*(torch.split(t, sizes) for t in tensors), strict=True)]

    def by_environment(self, of_rows: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply `of_rows` to the rows of each environment, and stack the results."""
        return _stacked(self.each_environment(of_rows, *tensors))

    def sums(self, values: Tensor, over: Iterable[int], dtype: torch.dtype | None = None) -> Tensor:
        """Sum over the rows of each environment, and over the dimensions `over`."""
        if len(set(self.sizes)) > 1:
            return self.by_environment(lambda rows: rows.sum((0, *over), dtype=dtype), values)
        apart = torch.unflatten(values, 0, (len(self.sizes), len(values) // len(self.sizes)))
        return apart.sum((1, *(dim + 1 for dim in over)), dtype=dtype)

    def trace(self, x: Tensor) -> Tensor:
        """Return the input of the model. If examples are checked, the input is checked, too."""
        if self._check is None or not (self.checks and x.is_floating_point()):
            return x
        source = x.detach().requires_grad_()
        self._check.watch(source, _INPUT)
        self._source.append(source)
        return source.clone()  # because the model may change its input in place

    def run(self, losses: Sequence[Tensor] | Tensor, leaves: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """Make the backward pass; see `Tape.run`. If it raises an error, the gradients are not valid.

        It raises an error if the model mixes examples. This includes layers whose first dimension is not examples but,
        for example, tokens, if it happens to have the same size.
        """
        inside = [] if self._computed is None else self._computed.leaves()
        leaves, others = [*leaves, *inside], [*self._source, *others]
        unknown, key = self._unknown(), self._key()
        if unknown and (self._of_data or key not in self._known or self._reached(losses, unknown)):
            assert self._check is not None
            self._check.activate()
            self._records = False
            self.differentiate(self._check.weighted(list(losses)), [*leaves, *others], retain_graph=True)
            self._records = True
            super().run(losses, leaves, others)
            if not self._check.passed():
                raise UnsupportedError("examples do not pass through the model independently of each other")
            self._known[key] = unknown - self._check.told()
            if _INPUT not in self._known[key]:
                self._known[self._case] = set()
        else:
            super().run(losses, leaves, others)
        self._pass_on()

    def untracked(self) -> str:
        """See `Tape.untracked`."""
        if self._layers:
            return super().untracked()
        return (
            f"no supported layer was called in the `with` block with a row for each of the {self.n_examples} "
            "examples of all environments"
        )

    def _reached(self, losses: Iterable[Tensor], layers: set[int]) -> bool:
        """Whether losses depend on one of these layers."""
        own = (node for node in nodes(*losses, most=sys.maxsize) if getattr(node, "tape", None) is self)
        return _INPUT in layers or any(node.number in layers for node in own)  # type: ignore[attr-defined]

    def _pass_on(self) -> None:
        """Pass gradients of tensors that were computed from parameters on to these parameters."""
        if self._computed is not None:
            for name, found in self._computed.passed_on(self):
                self.keep(name, found, self.params[name].dtype)

    def differentiate(
        self,
        losses: Sequence[Tensor] | Tensor,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor] | None = None,
        *,
        retain_graph: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """See `Tape.differentiate`. Layers raise an error if they are differentiated in any other way."""
        self._running = True
        try:
            return super().differentiate(losses, inputs, gradients, retain_graph=retain_graph)
        finally:
            self._running = False

    @cached_property
    def folding(self) -> Folding:
        """The moments into which gradients are folded if `fold` is true."""
        return Folding(self.params, len(self.sizes))

    def used(self) -> dict[str, Tensor]:
        """The gradients `[E, *shape]` by name, of the parameters that were used."""
        return {name: found.detach() for name, found in self._gradients.items()}

    def forget(self) -> None:
        """Drop all gradients and moments, because the outputs of the forward pass keep the tape alive."""
        self._gradients, self._computed = {}, None
        vars(self).pop("folding", None)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients `[E, *shape]` by name, with zeros for parameters that were not used."""
        found = self.used()
        return {
            name: found[name] if name in found else param.new_zeros(len(self.sizes), *param.shape)
            for name, param in self.params.items()
        }


class ApartPass(OnePass):
    """A pass that stacks nothing: `pieces()` returns gradients as layers compute them, `[E, *shape]` or a list of E.

    It is for programs that copy all gradients into one buffer: stacking would be one more copy.
    """

    def __init__(self, params: Mapping[str, Tensor], sizes: Sequence[int]) -> None:
        super().__init__(params, sizes)
        self._pieces: dict[str, Tensor | list[Tensor]] = {}

    def keep(self, name: str, found: Tensor | list[Tensor], dtype: torch.dtype) -> None:
        """See `OnePass.keep`."""
        if name in self._pieces:
            found = [one + other for one, other in zip(self._pieces[name], found, strict=True)]
        self._pieces[name] = found.to(dtype) if isinstance(found, Tensor) else [each.to(dtype) for each in found]

    def pieces(self) -> dict[str, Tensor | list[Tensor]]:
        """The E gradients by name, with zeros for parameters that were not used."""
        n_envs = len(self.sizes)
        unused = {name: p.detach() for name, p in self.params.items() if name not in self._pieces}
        return {**self._pieces, **{name: torch.zeros_like(p).expand(n_envs, *p.shape) for name, p in unused.items()}}


def _stacked(found: Sequence[Tensor]) -> Tensor:
    if found[0].is_contiguous() or found[0].ndim != 4:
        return torch.stack(list(found))
    # Channels last: each gradient keeps its order in memory, which is the order of its parameter.
    return torch.stack([one.permute(0, 2, 3, 1) for one in found]).permute(0, 1, 4, 2, 3)


def _looks_at_the_batch(_: Tensor, running_mean: Tensor | None, *__: Any, training: bool = False, **___: Any) -> bool:
    """Whether a call of `batch_norm` computes its statistics from the batch."""
    return training or running_mean is None


def _depends_on_data(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether the shape or order of a function's result depends on data, or the result is a Python number of data."""
    name = getattr(func, "__name__", "")
    if name == "__getitem__":
        places = args[1] if isinstance(args[1], tuple) else args[1:]
        ends = [end for each in places if isinstance(each, slice) for end in (each.start, each.stop)]
        masks = [each for each in places if isinstance(each, Tensor) and each.dtype == torch.bool]
        return bool(masks) or any(isinstance(end, Tensor) for end in ends)
    if name in ("where", "repeat_interleave"):
        return (name == "where") == (len(args) == 1) and isinstance(args[-1], Tensor)
    return name in _SHAPES_OF_DATA or name in _ORDERS_OF_DATA or name in _NUMBERS_OF_DATA
