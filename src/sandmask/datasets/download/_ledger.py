"""A ledger of checksums of archives and folders, recorded when they are first seen."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from sandmask._locking import lock
from sandmask._replacing import replacing
from sandmask.errors import SandmaskError

NAME = "sandmask-data.json"
LOCK = ".sandmask-data.lock"


class Ledger:
    """A JSON file in the data folder: {section: {key: facts}}. Every change is written at once and
    atomically.
    """

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / NAME

    def get(self, section: str, key: str) -> dict[str, Any] | None:
        """The record of `key`, or None."""
        facts: dict[str, Any] | None = self._read().get(section, {}).get(key)
        return facts

    def record(self, section: str, key: str, facts: dict[str, Any]) -> None:
        """Add facts to those under `key`."""
        content = self._read()
        entries = content.setdefault(section, {})
        entries[key] = {**entries.get(key, {}), **facts}
        self._write(content)

    def forget(self, section: str, key: str) -> None:
        """Drop what is recorded under `key`."""
        content = self._read()
        if content.get(section, {}).pop(key, None) is not None:
            self._write(content)

    def _read(self) -> dict[str, dict[str, dict[str, Any]]]:
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SandmaskError(f"{self.path} cannot be read ({error}). Fix or delete it.") from error
        if not isinstance(content, dict):
            raise SandmaskError(f"{self.path} should hold a JSON object. Fix or delete it.")
        return content

    def _write(self, content: dict[str, dict[str, dict[str, Any]]]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary:
                temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        except OSError as error:
            raise SandmaskError(f"{self.path} cannot be written ({error.strerror}).") from error


@contextmanager
def sole_user(data_dir: Path) -> Iterator[None]:
    """Hold the data folder's lock, so that two downloads do not write the same files."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        file = FileIO(data_dir / LOCK, "a")
    except OSError as error:
        raise SandmaskError(f"{data_dir} cannot be written to ({error.strerror}).") from error
    with file:
        taken = False
        with suppress(SandmaskError):  # a file system without locks: downloading unguarded is better than not at all
            taken = not lock(file)
        if taken:
            raise SandmaskError(f"Another `sandmask data` command is working in {data_dir}. Wait for it.")
        yield
