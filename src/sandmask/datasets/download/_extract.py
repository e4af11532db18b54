"""Unpack an archive that is not to be trusted: no file outside the folder, no links, no devices."""

import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from sandmask.errors import SandmaskError

CLUTTER = ("__MACOSX", ".DS_Store")


class ArchiveError(SandmaskError):
    """An archive that is damaged or that tries to write where it should not."""


def is_archive(path: Path) -> bool:
    """Whether the file is a zip or a tar, compressed or not; by its content."""
    return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def extract(archive: Path, folder: Path) -> int:
    """Unpack a zip or tar into `folder`; the number of files written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    try:
        for name, content in _zip_files(archive) if zipfile.is_zipfile(archive) else _tar_files(archive):
            with content:
                path = _place(archive, folder, name)
                if path is None:
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
                written += 1
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, RuntimeError, OSError) as error:
        raise ArchiveError(f"{archive} cannot be unpacked ({error}).") from error
    return written


def _zip_files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
            if member.is_dir():
                continue
            if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
                raise ArchiveError(f"{archive}: {member.filename!r} is a link or a device. Not unpacked.")
            yield member.filename, zipped.open(member)


def _tar_files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive) as tarred:
        for member in tarred:
            if member.isdir():
                continue
            content = tarred.extractfile(member) if member.isreg() else None
            if content is None:
                raise ArchiveError(f"{archive}: {member.name!r} is a link or a device. Not unpacked.")
            yield member.name, content


def _place(archive: Path, folder: Path, name: str) -> Path | None:
    """Where a member goes; None for what macOS adds. A name that leads elsewhere is refused."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts or ":" in path.parts[0]:
        raise ArchiveError(f"{archive}: {name!r} would be written outside of the folder. Not unpacked.")
    if path.parts[0] in CLUTTER or path.name in CLUTTER or path.name.startswith("._"):
        return None
    return folder.joinpath(*path.parts)
