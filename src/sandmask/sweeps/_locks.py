"""Locks on stacks that are being trained. A lock is released when its process ends, even if the process is killed.

Every stack that is being trained has a lock file with the ids of its runs. Locks are taken and read while holding
another lock, the `turn`, so that two programs with overlapping stacks do not train a run twice.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from sandmask._files import lock

_SUFFIX = ".lock"
_TURN = ".turn"


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait for the folder's lock over all locks, and hold it. Do not train while holding it."""
    with _opened(folder / _TURN, "a+") as file:
        lock(file, wait=True)
        yield


def _opened(path: Path, mode: str) -> FileIO:
    """Open a file to lock: for writing, as network disks require, or for reading if writing is not permitted."""
    try:
        return FileIO(path, mode)
    except OSError:
        if not path.exists():
            raise
        return FileIO(path)


@contextmanager
def claim(folder: Path, stack: str, run_ids: Sequence[str]) -> Iterator[bool]:
    """Hold a stack's lock while it is trained. Yields False if another process trains one of its runs."""
    path = folder / f"{stack}{_SUFFIX}"
    with turn(folder):
        file = None if claimed(folder) & set(run_ids) else _taken(path, run_ids)
    if file is None:
        yield False
        return
    with file:  # closing it releases the lock
        try:
            yield True
        finally:
            # On a disk that has become read-only, the lock file stays, unlocked.
            with suppress(OSError), turn(folder):
                path.unlink(missing_ok=True)


def _taken(path: Path, run_ids: Sequence[str]) -> FileIO | None:
    file = FileIO(path, "a+")
    if not lock(file):
        file.close()
        return None
    try:
        os.ftruncate(file.fileno(), 0)
        file.write(json.dumps(list(run_ids)).encode())
    except OSError as error:
        file.close()
        error.filename = str(path)
        raise
    return file


def claimed(folder: Path) -> set[str]:
    """The ids of runs that are being trained. Call this while holding the `turn`."""
    return {run for runs in claims(folder).values() for run in runs}


def claims(folder: Path) -> dict[str, list[str]]:
    """The stacks that are being trained, with the ids of their runs. Call this while holding the `turn`."""
    found: dict[str, list[str]] = {}
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            with _opened(path, "r+") as file:
                if not lock(file):
                    found[path.name.removesuffix(_SUFFIX)] = _runs(file.readall())
        except FileNotFoundError:
            continue
    return found


def _runs(content: bytes | None) -> list[str]:
    """The runs in a lock file; none if it is damaged."""
    try:
        runs = json.loads(content or b"[]")
    except ValueError:
        return []
    return [run for run in runs if isinstance(run, str)] if isinstance(runs, list) else []
