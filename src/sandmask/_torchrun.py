"""The environment variables that torchrun sets for its processes, read without importing torch."""

import os
import zlib
from datetime import timedelta

from sandmask._text import tell
from sandmask.errors import SandmaskError

_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = timedelta(seconds=5)  # for an answer of torchrun
_said: set[str] = set()  # printed by this process


class LostProcessError(SandmaskError):
    """Another process has stopped, or does not answer."""


class OtherProcessError(SandmaskError):
    """Another process has stopped with an error, which it reports itself."""


def world_size() -> int:
    """Return the number of processes that torchrun started, and 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _TOLD) else 1


def is_first() -> bool:
    """Return whether this is the process that prints and writes: the first one, or the only one."""
    return world_size() == 1 or os.environ["RANK"] == "0"


def say_once(text: str) -> None:
    """Print a line on standard error, only once if several processes print the same line."""
    if first_to_say(text):
        tell(text)


def first_to_say(text: str) -> bool:
    """Return whether neither this process nor another one that torchrun started has printed this text.

    The processes ask torchrun, which outlives them. If it does not answer, only the first process prints it.

    :param text: the line.
    """
    if world_size() == 1:
        return True
    if text in _said:
        return False
    _said.add(text)
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=_PATIENCE)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return int(store.add(f"sandmask/said/{attempt}/{zlib.crc32(text.encode())}", 1)) == 1
    except (ImportError, RuntimeError, ValueError):
        return is_first()
