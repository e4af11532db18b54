"""Try a way to take gradients: undo what a failed try did to buffers, and do not repeat it in the next step."""

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sandmask.gradients._tape import UnsupportedError

Found = TypeVar("Found")

# A model that raises these may work in a loop: `vmap` has no branches on values, and lacks rules for some functions. If
# not, the loop raises the clearer error.
REFUSED = (UnsupportedError, RuntimeError)

# Of models: the ways that failed, with the reason, and those that left all buffers as they were.
_refused: WeakKeyDictionary[nn.Module, dict[object, str]] = WeakKeyDictionary()
_steady: WeakKeyDictionary[nn.Module, set[object]] = WeakKeyDictionary()


class Attempts:
    """The ways to take a model's gradients that are tried one after the other.

    :param model: the model.
    :param case: what decides whether a way works, such as the shapes of inputs.
    """

    def __init__(self, model: nn.Module, case: tuple[object, ...]) -> None:
        self._model, self._case = model, case
        self._refused = _refused.setdefault(model, {})
        self._steady = _steady.setdefault(model, set())
        self._pending: dict[object, str] = {}

    def attempt(self, way: str, call: Callable[[], Found]) -> Found:
        """Return `call()`. If it fails, or failed in this case before, raise one of `REFUSED`, with unchanged buffers.

        A call that changes buffers fails too: a loop changes them once for each environment.
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
        """Remember the ways that failed, once another one did not: then inputs and loss are as they should be."""
        self._refused.update(self._pending)
        self._pending.clear()


class _Buffers:
    """A copy of the buffers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, tuple[nn.Module, str, Tensor, int, Tensor]] = {}
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():  # noqa: SLF001 - `named_buffers` does not tell the module
                if buffer is not None and not buffer.is_inference():
                    place = f"{path}.{name}" if path else name
                    self._before[place] = module, name, buffer, buffer._version, buffer.clone()  # noqa: SLF001

    def changed(self) -> list[str]:
        """The names of buffers that were replaced or written to."""
        return [
            place
            for place, (module, name, buffer, version, _) in self._before.items()
            if dict(module._buffers.items()).get(name) is not buffer or buffer._version != version  # noqa: SLF001
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo all changes."""
        for place in self.changed():
            module, name, buffer, version, copy = self._before[place]
            module._buffers[name] = buffer  # noqa: SLF001
            if buffer._version != version:  # noqa: SLF001
                buffer.copy_(copy)
