"""What becomes of memory that a process has freed."""

import ctypes
from functools import cache

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of glibc's malloc.h


@cache
def keep_freed_memory() -> bool:
    """Have the process keep what it frees, for its next step; says whether that could be arranged.

    The C library of Linux maps blocks of over 32 MB afresh every time, and gives back what is free at the end of its
    heap. A step that needs the same memory as the one before then touches every page for the first time again. The
    process holds what it once needed until it ends, and may hold a little more: a block that is to be aligned does not
    always fit where one like it was.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another system, or another C library
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
