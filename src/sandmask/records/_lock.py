"""One writer a file: an exclusive lock that dies with its process."""

import os
from io import FileIO
from pathlib import Path

from sandmask._locking import lock
from sandmask.errors import SandmaskError


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
