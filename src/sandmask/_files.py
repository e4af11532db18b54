"""Files are replaced by renaming a temporary one, and locked exclusively, until their process ends."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from sandmask.errors import SandmaskError

ABANDONED_SECONDS = 60.0  # after the last write; a process of another machine may share the disk

_swept: set[Path] = set()


@contextmanager
def replacing(path: Path, *, durable: bool = False, suffix: str = "") -> Iterator[Path]:
    """Yield a name beside `path` to write under; the file is renamed to `path` at the end, or removed after an error.

    A link keeps pointing to the file that is replaced. A device or a pipe is written to directly. Temporary files of
    processes that were killed while they wrote the same path are removed. An error that names no file, such as a full
    disk, gets the name of `path`.

    :param durable: return only when the content and the name are on the disk, so that they survive a power cut.
    :param suffix: how the temporary name ends, for writers that look at it.
    """
    if path.exists() and not path.is_file():
        with naming(path):
            yield path
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp{suffix}")
    _remove_abandoned(target)
    try:
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(target)
        if durable:
            sync(target.parent)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno and error.filename in (None, temporary, str(temporary)):
            error.filename = str(path)  # the name that the user knows
        with suppress(OSError):  # the folder may be read-only, or gone: the first error is the one to report
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an error that names no file, such as a full disk, the name of the file that is written."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk. Folders can be synced on POSIX only."""
    if os.name != "posix" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path, name: str = "*") -> None:
    """Remove temporary files that killed processes left in a folder.

    :param name: a pattern of the names of the files that they were to replace.
    """
    for path in folder.glob(f".{name}.*.tmp*"):
        owner = path.name.rpartition(".tmp")[0].rpartition(".")[2]
        with suppress(OSError):
            if owner.isdecimal() and not is_alive(int(owner)) and _age(path) > ABANDONED_SECONDS:
                path.unlink(missing_ok=True)


def _remove_abandoned(target: Path) -> None:
    """Look once for each target: listing a large folder takes time."""
    if target not in _swept:
        _swept.add(target)
        with suppress(OSError):
            remove_abandoned(target.parent, _literal(target.name))


def _literal(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "[*?" else letter for letter in name)


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def is_alive(process: int) -> bool:
    """Whether there is a process with this number; True where that cannot be found out."""
    if os.name != "posix":
        return True  # a signal would end it
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


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
