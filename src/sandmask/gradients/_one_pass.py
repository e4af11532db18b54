"""All environments' gradients from one forward and one backward pass over their concatenated batches.

A parameter that is used in any other way raises `UnsupportedError`, and the caller takes the environments one by one.
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

# Models, and the cases in which their examples were found to be independent of each other, with the layers of which
# this is not known yet: no gradient arrived there.
_independent: WeakKeyDictionary[nn.Module, dict[object, set[int]]] = WeakKeyDictionary()
_INPUT = -1  # the model's input, among layers

# What has a shape, an order or a value that depends on data. A layer's rows may then be an example's in one pass, and
# not in the next, though there are as many.
_SHAPES_OF_DATA = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_pack_padded_sequence"}
_ORDERS_OF_DATA = {"sort", "argsort", "topk", "randperm"}
_NUMBERS_OF_DATA = {"tolist", "item", "numpy", "__array__", "__int__", "__index__"}


class OnePass(Tape):
    """While active, layers keep the gradients of `params` apart; after the backward pass, `gradients()` has them.

    :param params: parameters by name.
    :param sizes: number of examples of each environment.
    :param fold: fold gradients into moments as soon as they are computed, while a CPU still has them in its cache. A
        parameter may then be used only once. After the backward pass, `folding` has them.
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
        self._of_data = False  # whether something depends on data: then every pass is checked
        self._layers: list[object] = []  # that were computed: their parameters, and if an example is one row of them
        # What is used outside of layers. Where its first dimension is something else than examples, the check notices.
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
        """As in `Tape`; batch-norm with batch statistics is refused, also if its parameters are not watched."""
        kwargs = kwargs or {}
        if func is F.batch_norm and _looks_at_the_batch(*args, **kwargs) and id(args[0]) not in self.names:
            raise UnsupportedError("batch-norm in training mode mixes environments")
        self._of_data = self._of_data or _depends_on_data(func, args)
        return super().__torch_function__(func, types, args, kwargs)

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], used: set[str]) -> Any:
        """See `Tape.use`; if examples are checked, parameters may also be used outside of layers."""
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
        """Whether `run` may check that examples are independent, for which it needs the loss of every environment."""
        if self._check is None:
            return False
        return bool(self._unknown()) if self._layers else self._case not in self._known

    def _key(self) -> object:
        return self._case, tuple(self._layers)

    def _unknown(self) -> set[int]:
        """The layers of which it is not known whether their rows are those of examples."""
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
        """Check that a layer's input has one row per example, so that gradients can be assigned to environments.

        It may also have several, such as tokens, where one example comes after the other.
        """
        if x.ndim < 2 or not self.holds_examples(x.shape):
            raise UnsupportedError(f"a layer's input has the shape {tuple(x.shape)}")

    def holds_examples(self, shape: Sequence[int]) -> bool:
        """Whether the first dimension may be that of examples."""
        rows, n_examples = shape[0] if shape else 0, self.n_examples
        return rows == n_examples or (self._computed is not None and rows > 0 and rows % n_examples == 0)

    def detached(self, value: Any) -> Any:
        """What a layer should get in the place of a tensor that was computed from parameters."""
        return value if self._computed is None else self._computed.detached(value)

    def watch_computed(self, found: Tensor, param: Tensor) -> Tensor:
        """Watch what was computed from a parameter."""
        assert self._computed is not None
        self._computed.watch(self.names, found, {self.names[id(param)]})
        return found

    def add(self, param: Tensor | None, of_environments: Callable[[], Tensor | list[Tensor]]) -> None:
        """Add gradients of a parameter, `[E, *shape]` or E of them; a shared one is added to."""
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
            self._computed.add(name, gradients)  # a copy, because layers use memory again if gradients are folded

    def keep(self, name: str, found: Tensor | list[Tensor], dtype: torch.dtype) -> None:
        """Keep the gradients of a parameter, or fold them."""
        gradients = (found if isinstance(found, Tensor) else _stacked(found)).to(dtype)
        if self.folds:
            self.folding.add(name, gradients.detach())
            return
        self._gradients[name] = self._gradients[name] + gradients if name in self._gradients else gradients

    def each_environment(self, of_rows: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        """`of_rows` of each environment's rows."""
        rows = len(tensors[0]) // self.n_examples  # of each
        sizes = self.sizes if rows == 1 else [size * rows for size in self.sizes]
        return [of_rows(*part) for part in zip(*(torch.split(t, sizes) for t in tensors), strict=True)]

    def by_environment(self, of_rows: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`of_rows` of each environment's rows, stacked."""
        return _stacked(self.each_environment(of_rows, *tensors))

    def sums(self, values: Tensor, over: Iterable[int], dtype: torch.dtype | None = None) -> Tensor:
        """The sums of each environment's rows, and over these further dimensions."""
        if len(set(self.sizes)) > 1:
            return self.by_environment(lambda rows: rows.sum((0, *over), dtype=dtype), values)
        apart = torch.unflatten(values, 0, (len(self.sizes), len(values) // len(self.sizes)))
        return apart.sum((1, *(dim + 1 for dim in over)), dtype=dtype)

    def trace(self, x: Tensor) -> Tensor:
        """Return the model's input, and check it too if examples are checked."""
        if self._check is None or not (self.checks and x.is_floating_point()):
            return x
        source = x.detach().requires_grad_()
        self._check.watch(source, _INPUT)
        self._source.append(source)
        return source.clone()  # which the model may change in place

    def run(self, losses: Sequence[Tensor] | Tensor, leaves: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """The backward pass, see `Tape.run`. The gradients are of no use if it raises an error.

        It does in a model that mixes examples, and in one whose layers have something other than examples in the first
        dimension, such as tokens, if there happen to be as many.
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
            f"no layer that can be tracked was called in the `with` block with a row for each of the {self.n_examples} "
            "examples of all environments together"
        )

    def _reached(self, losses: Iterable[Tensor], layers: set[int]) -> bool:
        """Whether losses depend on one of these layers."""
        own = (node for node in nodes(*losses, most=sys.maxsize) if getattr(node, "tape", None) is self)
        return _INPUT in layers or any(node.number in layers for node in own)  # type: ignore[attr-defined]

    def _pass_on(self) -> None:
        """Give parameters the gradients of what was computed from them."""
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
        """See `Tape.differentiate`; layers refuse to be differentiated in any other way."""
        self._running = True
        try:
            return super().differentiate(losses, inputs, gradients, retain_graph=retain_graph)
        finally:
            self._running = False

    @cached_property
    def folding(self) -> Folding:
        """The moments into which gradients are folded, with `fold`."""
        return Folding(self.params, len(self.sizes))

    def used(self) -> dict[str, Tensor]:
        """Name -> `[E, *shape]`, of those parameters that were used."""
        return {name: found.detach() for name, found in self._gradients.items()}

    def forget(self) -> None:
        """Drop all gradients and moments: the outputs of the forward pass keep the tape alive."""
        self._gradients, self._computed = {}, None
        vars(self).pop("folding", None)

    def gradients(self) -> dict[str, Tensor]:
        """Name -> `[E, *shape]`; zeros for parameters that were not used."""
        found = self.used()
        return {
            name: found[name] if name in found else param.new_zeros(len(self.sizes), *param.shape)
            for name, param in self.params.items()
        }


class ApartPass(OnePass):
    """A pass that stacks nothing: `pieces()` has the gradients as layers give them, `[E, *shape]` or a list of E.

    For programs that put all of them in one place, where a stack of each would be one more copy.
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
        """Name -> E gradients; zeros for parameters that were not used."""
        n_envs = len(self.sizes)
        unused = {name: p.detach() for name, p in self.params.items() if name not in self._pieces}
        return {**self._pieces, **{name: torch.zeros_like(p).expand(n_envs, *p.shape) for name, p in unused.items()}}


def _stacked(found: Sequence[Tensor]) -> Tensor:
    if found[0].is_contiguous() or found[0].ndim != 4:
        return torch.stack(list(found))
    # Channels last: keep each gradient's order in memory, which is its parameter's.
    return torch.stack([one.permute(0, 2, 3, 1) for one in found]).permute(0, 1, 4, 2, 3)


def _looks_at_the_batch(_: Tensor, running_mean: Tensor | None, *__: Any, training: bool = False, **___: Any) -> bool:
    """Whether a call of `batch_norm` computes its statistics from the batch."""
    return training or running_mean is None


def _depends_on_data(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function's result has a shape or an order that depends on data, or is a number of them."""
    name = getattr(func, "__name__", "")
    if name == "__getitem__":
        places = args[1] if isinstance(args[1], tuple) else args[1:]
        ends = [end for each in places if isinstance(each, slice) for end in (each.start, each.stop)]
        masks = [each for each in places if isinstance(each, Tensor) and each.dtype == torch.bool]
        return bool(masks) or any(isinstance(end, Tensor) for end in ends)
    if name in ("where", "repeat_interleave"):
        return (name == "where") == (len(args) == 1) and isinstance(args[-1], Tensor)
    return name in _SHAPES_OF_DATA or name in _ORDERS_OF_DATA or name in _NUMBERS_OF_DATA
