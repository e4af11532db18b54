"""Exclusive locks on files, which end with their process."""

import sys
from io import FileIO
from pathlib import Path

from sandmask.errors import SandmaskError


def lock(file: FileIO, *, wait: bool = False) -> bool:
    """Take the exclusive lock of an open file; return False when another holder has it.

    `flock`, not `lockf`: it also excludes a second holder in the same process, and reading the file elsewhere in the
    process does not release it. Windows has no such locks: files are not guarded there. Where the file system has no
    locks, the file is closed, and the error says so.

    :param wait: wait until the lock is free.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        file.close()
        raise SandmaskError(
            f"{Path(str(file.name))} cannot be locked: {error.strerror}. Use a folder on a file system with locks."
        ) from error
    return True
