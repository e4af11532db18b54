"""One writer a file: an exclusive lock that dies with its process."""

import os
import sys
from io import FileIO
from pathlib import Path

from sandmask.errors import SandmaskError


def lock(file: FileIO) -> bool:
    """Take the exclusive lock of an open file; False when another writer has it.

    `flock`, not `lockf`: it also holds against a second writer in the same process, and reading the file
    elsewhere in the process does not release it. Systems without it (Windows) go unguarded.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def open_locked(path: Path) -> FileIO:
    """Open `path` for reading and appending, created if need be, and lock it; an error when it is taken."""
    while True:
        file = FileIO(path, "a+")
        if not lock(file):
            file.close()
            raise SandmaskError(
                f"{path} is being written by another process. A record file has one writer: "
                "wait until that one ends, or write to another folder."
            )
        # Between opening and locking, the former holder may have replaced the file by a rewound one.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()
