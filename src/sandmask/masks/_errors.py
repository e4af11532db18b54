"""What goes wrong with masks: errors for mistakes, warnings for settings that surely are not meant."""

import warnings

from sandmask.errors import SandmaskError


class MaskError(SandmaskError, ValueError):
    """A mask or its gradients cannot be used as given; the message names parameter and environment."""


class MaskWarning(UserWarning):
    """Legal, but almost certainly not what was meant."""


_warned: set[str] = set()


def warn_once(key: str, message: str, stacklevel: int = 3) -> None:
    """Warn about `key` the first time in this process only: a sweep builds thousands of masks."""
    if key in _warned:
        return
    _warned.add(key)
    warnings.warn(message, MaskWarning, stacklevel=stacklevel)
