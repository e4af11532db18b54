"""Errors and warnings of masks."""

import warnings

from sandmask.errors import SandmaskError


class MaskError(SandmaskError, ValueError):
    """A mask or its gradients are not valid; the message names the parameter and the environment."""


class MaskWarning(UserWarning):
    """A setting that is valid but probably a mistake."""


_warned: set[str] = set()


def warn_once(key: str, message: str, stacklevel: int = 3) -> None:
    """Warn about `key` the first time in this process only: a sweep builds thousands of masks."""
    if key in _warned:
        return
    _warned.add(key)
    warnings.warn(message, MaskWarning, stacklevel=stacklevel)
