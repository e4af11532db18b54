"""`torch.compile` with a fallback to eager execution."""

import warnings
from collections.abc import Callable
from typing import Any

import torch


class Compiled:
    """A function, compiled at its first call. If the compiler fails, it warns and runs the function as it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = torch.compile(function, dynamic=False)

    def __call__(self, *args: Any) -> Any:
        """The function's result."""
        if self._compiled is None:
            return self._function(*args)
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._compiled(*args)
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"torch.compile failed ({reason}); continuing without it.", stacklevel=2)
            self._compiled = None
            return self._function(*args)
