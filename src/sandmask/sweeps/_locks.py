"""Locks on stacks that are being trained, which end with their process, also when it is killed.

Every stack that is being trained has a lock file which names its runs. Taking and looking at locks happens under one
more lock, held for a moment only, so that two programs whose stacks merely overlap do not train a run twice.
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
    """Wait for, and hold, the folder's one lock over all locks. For a moment: never train under it."""
    with _opened(folder / _TURN, "a+") as file:
        lock(file, wait=True)
        yield


def _opened(path: Path, mode: str) -> FileIO:
    """A file to lock: for writing, as locks over a network want it, or for reading where that is all one may do."""
    try:
        return FileIO(path, mode)
    except OSError:
        if not path.exists():
            raise
        return FileIO(path)


@contextmanager
def claim(folder: Path, stack: str, run_ids: Sequence[str]) -> Iterator[bool]:
    """Hold a stack's lock while it is trained; False where another process is at one of its runs."""
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
            # Where the disk has become read-only, the lock file stays. It is free then, and the next holder takes it.
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
    """The runs that some process is training now. Call it in one's `turn`: looking takes locks for an instant."""
    return {run for runs in claims(folder).values() for run in runs}


def claims(folder: Path) -> dict[str, list[str]]:
    """The stacks that some process is training now, and their runs; call it in one's `turn`."""
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
    """The runs that a lock file names; none where a disk has damaged it. Its stack is locked all the same."""
    try:
        runs = json.loads(content or b"[]")
    except ValueError:
        return []
    return [run for run in runs if isinstance(run, str)] if isinstance(runs, list) else []
