"""Find and lock files, and replace files by renaming a temporary file."""

import glob
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from sandmask.errors import SandmaskError

ABANDONED_SECONDS = 60.0  # age of files that may be removed: processes of other machines may share the disk

_swept: set[Path] = set()


@contextmanager
def replacing(path: Path, *, durable: bool = False, suffix: str = "") -> Iterator[Path]:
    """Yield the path of a temporary file, which is renamed to `path` at the end, or removed after an error.

    A link keeps pointing to the file that is replaced. A device or a pipe is written to directly. Temporary files of
    processes that were killed while they wrote the same path are removed. Errors name `path`, see `naming`.

    :param durable: return only when the content and the name are on the disk, so that they survive a power cut.
    :param suffix: ending of the temporary name, for writers that depend on it.
    """
    if path.exists() and not path.is_file():
        with naming(path):
            yield path
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp{suffix}")
    if target not in _swept:  # once per target, because listing a large folder takes time
        _swept.add(target)
        with suppress(OSError):
            remove_abandoned(target.parent, glob.escape(target.name))
    try:
        with naming(path, temporary):
            yield temporary
            if durable:
                sync(temporary)
            temporary.replace(target)
            if durable:
                sync(target.parent)
    except BaseException:
        with suppress(OSError):  # the folder may be read-only or gone; the first error is raised
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Put the name of `path` into errors that name no file, such as a full disk, or that name the temporary file."""
    try:
        yield
    except OSError as error:
        unknown = error.filename is None or (temporary is not None and str(error.filename) == str(temporary))
        if error.errno and unknown:
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Folders are synced on POSIX only."""
    if os.name != "posix" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_below(folder: Path, *endings: str) -> list[Path]:
    """The files below a folder whose names end with one of `endings`, sorted. Links to folders are followed.

    A folder that is reached twice is read once, so links may form a cycle. A broken link counts as a file.
    """
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()

    def is_new(path: str) -> bool:
        try:
            stat = os.stat(path)  # noqa: PTH116 - a sweep may have tens of thousands of folders
        except OSError:  # removed since it was listed
            return False
        before = len(seen)
        seen.add((stat.st_dev, stat.st_ino))
        return len(seen) > before

    is_new(str(folder))
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in sorted(folders) if is_new(os.path.join(parent, name))]  # noqa: PTH118
        found += [Path(parent, name) for name in names if name.endswith(endings)]
    return sorted(found)


@contextmanager
def opened_parquet(path: Path, **options: Any) -> Iterator[Any]:
    """Open a Parquet file, to be read in the calling thread: pass `use_threads=False` to its methods.

    Arrow's threads may release a buffer of Python after a read has returned. If the interpreter ends at that moment,
    the process aborts or hangs, although everything was done (apache/arrow issues 34314 and 50482).

    :param options: further options of `pyarrow.parquet.ParquetFile`.
    """
    import pyarrow.parquet as pq

    # Opened here: Arrow takes paths in UTF-8 only.
    with path.open("rb") as source, pq.ParquetFile(source, pre_buffer=False, **options) as file:
        yield file


def remove_abandoned(folder: Path, name: str = "*") -> None:
    """Remove temporary files that killed processes left in a folder.

    :param name: a pattern for the names of the files that would have been replaced.
    """
    for path in folder.glob(f".{name}.*.tmp*"):
        owner = path.name.rpartition(".tmp")[0].rpartition(".")[2]
        with suppress(OSError):
            age = time.time() - path.stat().st_mtime
            if owner.isdecimal() and not is_alive(int(owner)) and age > ABANDONED_SECONDS:
                path.unlink(missing_ok=True)


def is_alive(process: int) -> bool:
    """Whether there is a process with this id; True if this cannot be determined."""
    if os.name != "posix":
        return True  # on Windows, `os.kill` would end the process
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def lock(file: FileIO, *, wait: bool = False) -> bool:
    """Take the exclusive lock of an open file until the file is closed. Return False if somebody else has it.

    It uses `flock`, which unlike `lockf` also excludes a second holder in the same process, and is not released by
    reading the file elsewhere in the process. On Windows, which has no such locks, nothing is locked. If the file
    system has no locks, the file is closed and an error raised.

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
