"""Settings of the C library that make a process keep memory that it has freed."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # names of glibc's malloc.h
_MMAP_FROM = 32 * 2**20  # glibc's largest threshold: blocks of this size and more are mapped
_lock = threading.Lock()
_users: list[object] = []


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Keep freed memory for the next step. Yields False if the C library has no such setting.

    The C library of Linux maps every block of more than 32 MB anew, and returns free memory at the end of its heap to
    the system, so that each step has to fault in the same pages again. Within this context, the process keeps its
    memory. It may hold slightly more, because an aligned block does not always fit where a similar block was.
    """
    user = object()
    with _lock:
        _users.append(user)
        could = _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1})
    try:
        yield could
    finally:
        with _lock:
            _users.remove(user)
            if could and not _users:
                _set({_MMAP_MAX: 65536, _MMAP_THRESHOLD: _MMAP_FROM, _TRIM_THRESHOLD: 2 * _MMAP_FROM})
                ctypes.CDLL(None).malloc_trim(0)


def _set(options: dict[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another system, or another C library
        return False
    return all(mallopt(option, value) for option, value in options.items())
