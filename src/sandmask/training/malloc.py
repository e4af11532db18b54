"""Keep memory that the process has freed."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # names of glibc's malloc.h
_MMAP_FROM = 32 * 2**20  # the block size from which on glibc maps afresh, at the end of its own adjustment
_lock = threading.Lock()
_users: list[object] = []


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Have the process keep freed memory for its next step; yields False where the C library has no such setting.

    The C library of Linux maps every block of over 32 MB anew and returns what is free at the end of its heap. A step
    that needs the same memory as the one before then faults in every page again. Inside of this context the process
    holds what it once needed, and may hold a little more: an aligned block does not always fit where a similar one was.
    Afterwards large blocks are mapped and returned as before.
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
