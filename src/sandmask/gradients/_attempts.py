"""Try a way to compute gradients. A failed attempt leaves buffers unchanged and is not repeated in the next step."""

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sandmask.gradients._tape import UnsupportedError

Found = TypeVar("Found")

# Errors after which a loop over environments may still work: `vmap` does not support branches on values, and lacks
# rules for some functions. If the loop fails too, its error is clearer.
REFUSED = (UnsupportedError, RuntimeError)

# For each model: the ways that failed, with the reason, and the ways that left all buffers unchanged.
_refused: WeakKeyDictionary[nn.Module, dict[object, str]] = WeakKeyDictionary()
_steady: WeakKeyDictionary[nn.Module, set[object]] = WeakKeyDictionary()


class Attempts:
    """Tries several ways to compute the gradients of a model, one after the other.

    :param model: the model.
    :param case: conditions on which the success of a way depends, such as the shapes of inputs.
    """

    def __init__(self, model: nn.Module, case: tuple[object, ...]) -> None:
        self._model, self._case = model, case
        self._refused = _refused.setdefault(model, {})
        self._steady = _steady.setdefault(model, set())
        self._pending: dict[object, str] = {}

    def attempt(self, way: str, call: Callable[[], Found]) -> Found:
        """Return `call()`. Raise one of `REFUSED`, with unchanged buffers, if it fails or failed in this case before.

        A call that changes buffers also fails, because a loop changes buffers once for each environment.
        """
        if self.worked(way):
            return call()
        key = (way, *self._case)
        if key in self._refused:
            raise UnsupportedError(self._refused[key])
        buffers = _Buffers(self._model)
        try:
            found = call()
            if changed := buffers.changed():
                raise UnsupportedError(f"`{changed[0]}` changes in a forward pass")
        except BaseException as error:
            buffers.restore()
            if isinstance(error, REFUSED) and not isinstance(error, torch.OutOfMemoryError):
                self._pending[key] = str(error)
            raise
        self._steady.add(key)
        self.settle()
        return found

    def worked(self, way: str) -> bool:
        """Whether this way worked in this case before."""
        return (way, *self._case) in self._steady

    def settle(self) -> None:
        """Remember the ways that failed. Called once another way succeeds, so the inputs and the loss are valid."""
        self._refused.update(self._pending)
        self._pending.clear()


class _Buffers:
    """A copy of the buffers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, tuple[nn.Module, str, Tensor, int, Tensor]] = {}
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():  # noqa: SLF001 - `named_buffers` does not tell the module
                if buffer is not None and not buffer.is_inference():
                    path = f"{prefix}.{name}" if prefix else name
                    self._before[path] = module, name, buffer, buffer._version, buffer.clone()  # noqa: SLF001

    def changed(self) -> list[str]:
        """The names of buffers that were replaced or written to."""
        return [
            path
            for path, (module, name, buffer, version, _) in self._before.items()
            if dict(module._buffers.items()).get(name) is not buffer or buffer._version != version  # noqa: SLF001
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo all changes."""
        for path in self.changed():
            module, name, buffer, version, copy = self._before[path]
            module._buffers[name] = buffer  # noqa: SLF001
            if buffer._version != version:  # noqa: SLF001
                buffer.copy_(copy)
