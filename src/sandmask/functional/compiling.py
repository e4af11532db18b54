"""`torch.compile` with a fallback to eager execution."""

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from sandmask._physical import tracing
from sandmask._text import first_line
from sandmask.gradients import UnsupportedError

# Batch sizes and classifiers for which one process compiles the same code; after torch's 8, it would run eagerly.
VARIANTS = 64
KEPT = 8  # recorded programs that later runs of the process may use


class Compiled:
    """A function that is compiled at its first call. If the compiler fails, it warns and runs the function eagerly."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = torch.compile(function, dynamic=False)
        self._called = False

    def __reduce__(self) -> tuple[type[Self], tuple[Callable[..., Any]]]:
        """Copy the function without its compiled form."""
        return type(self), (self._function,)

    def __call__(self, *args: Any) -> Any:
        """The function's result."""
        if self._compiled is None:
            return self._function(*args)
        from torch._dynamo import config
        from torch._dynamo.exc import TorchDynamoException

        quiet = nullcontext() if self._called else _without_remarks()
        self._called = True
        try:
            with quiet, config.patch(recompile_limit=VARIANTS):
                return self._compiled(*args)
        except TorchDynamoException as error:
            reason = first_line(error)
            warnings.warn(f"torch.compile failed ({reason}); continuing without it.", stacklevel=2)
            self._compiled = None
            return self._function(*args)


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Leave out the compiler's warnings about its own choices, which a user cannot influence."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
        yield


class Traced:
    """A function of trees of tensors that computes gradients, compiled as one program with its backward passes.

    At the first call with tensors of given shapes, the function runs and its operations are recorded, including the
    operations of backward passes. A function that reads numbers from tensors raises `UnsupportedError`. If the compiler
    fails, a warning is raised, and the recorded operations run eagerly.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        # A short list, because older versions of torch cannot hash a `TreeSpec`.
        self._programs: list[tuple[object, tuple[Compiled, pytree.TreeSpec]]] = []

    def __call__(self, *args: Any) -> Any:
        """The function's result, detached."""
        leaves, form = pytree.tree_flatten(args)
        shapes = tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves)
        case = (shapes, form)
        found = next((found for known, found in self._programs if known == case), None)
        if found is None:
            found = self._trace(leaves, form)
            self._programs.append((case, found))
        program, out_form = found
        with torch.no_grad():
            return pytree.tree_unflatten(program(*leaves), out_form)

    def _trace(self, leaves: list[Tensor], form: pytree.TreeSpec) -> tuple[Compiled, pytree.TreeSpec]:
        from torch.fx.experimental.proxy_tensor import make_fx

        forms: list[pytree.TreeSpec] = []

        def flat(*leaves: Tensor) -> list[Tensor]:
            with torch.enable_grad():
                found = self._function(*pytree.tree_unflatten(leaves, form))
            results, out_form = pytree.tree_flatten(found)
            forms.append(out_form)
            return [result.detach() for result in results]

        try:
            with tracing():
                graph = make_fx(flat)(*leaves)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = first_line(error)
            warnings.warn(f"torch.compile failed for a whole pass ({reason}); continuing without it.", stacklevel=2)
            raise UnsupportedError(reason) from error
        return _compiled(graph), forms[0]


_kept: deque[tuple[GraphModule, Compiled]] = deque(maxlen=KEPT)


def _compiled(graph: GraphModule) -> Compiled:
    """The compiled graph; that of an earlier run, if it has the same operations and constants."""
    for earlier, compiled in _kept:
        if _same(graph, earlier):
            return compiled
    compiled = Compiled(graph)
    _kept.append((graph, compiled))
    return compiled


def _same(one: GraphModule, other: GraphModule) -> bool:
    if one.code != other.code:
        return False
    pairs = [(getattr(one, name, None), getattr(other, name, None)) for name in _constants(one)]
    return all(isinstance(a, Tensor) and isinstance(b, Tensor) and _equal(a, b) for a, b in pairs)


def _constants(graph: GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]


def _equal(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)
