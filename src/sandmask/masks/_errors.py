"""Errors and warnings of masks."""

import warnings

from sandmask.errors import SandmaskError


class MaskError(SandmaskError, ValueError):
    """Raised if a mask or its gradients are not valid. The message names the parameter and the environment."""


class MaskWarning(UserWarning):
    """Warns about a setting that is valid but probably a mistake."""


_warned: set[str] = set()


def warn_once(key: str, message: str, stacklevel: int = 3) -> None:
    """Warn about `key` only once per process, because a sweep creates thousands of masks."""
    if key in _warned:
        return
    _warned.add(key)
    warnings.warn(message, MaskWarning, stacklevel=stacklevel)
