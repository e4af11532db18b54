"""Unpack untrusted archives: no files outside of the folder, no links, no devices, and a limited size.

Archives are read completely and compared with their checksums, so that damage is detected.
"""

import bz2
import gzip
import lzma
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import IO, Any

from sandmask.datasets.download._http import CHUNK, writing
from sandmask.errors import SandmaskError

CLUTTER = ("__MACOSX", ".DS_Store")
MOST_EXPANSION, ALLOWANCE = 20, 2**30  # limit of the unpacked size; images are already compressed
RESERVE = 2**28  # bytes of the disk that are left free
BLOCK = 4096  # bytes of the disk that the smallest file needs
LONGEST_HEADER = 2**26  # bytes
_COMPRESSED = {b"\x1f\x8b": gzip.GzipFile, b"BZ": bz2.BZ2File, b"\xfd7": lzma.LZMAFile}
_DAMAGE = (
    zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, struct.error,
    RuntimeError, OSError, ValueError, IndexError, KeyError, OverflowError,
)  # fmt: skip


class ArchiveError(SandmaskError):
    """An archive is damaged or unsafe."""


def is_archive(path: Path) -> bool:
    """Whether the content of a file is a zip or tar archive, compressed or not."""
    try:
        return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)
    except _DAMAGE:
        return False


def extract(archive: Path, folder: Path) -> int:
    """Unpack a zip or tar archive.

    :param archive: the archive.
    :param folder: folder to write to.
    :return: number of files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    budget = _Budget(archive, folder)
    written = 0
    try:
        members = _zip_files(archive, budget) if zipfile.is_zipfile(archive) else _tar_files(archive, budget)
        for name, content in members:
            with content:
                path = _place(archive, folder, name)
                if path is not None:
                    _copy(content, path)
                    written += 1
    except _DAMAGE as error:
        raise ArchiveError(f"{archive} cannot be unpacked ({error or type(error).__name__}).") from error
    return written


class _Budget:
    """Limits the unpacked size, given the size of the archive and the free disk space."""

    def __init__(self, archive: Path, folder: Path) -> None:
        self.archive, self.folder = archive, folder
        self.most = MOST_EXPANSION * archive.stat().st_size + ALLOWANCE
        self.free = shutil.disk_usage(folder).free - RESERVE
        self.total = 0

    def take(self, size: int) -> None:
        """Count the size of a file before it is written, and raise an error above the limit."""
        self.total += max(size, BLOCK)
        if self.total > self.most:
            raise ArchiveError(
                f"{self.archive} would take more than {self.most:,} bytes when unpacked, which is too much for an "
                "archive of its size. The archive was not unpacked."
            )
        if self.total > self.free:
            raise SandmaskError(
                f"{self.archive} needs at least {self.total:,} bytes when unpacked, and {self.folder} has room for "
                f"{max(self.free, 0):,}. Free some space, or choose another --data-dir."
            )


def _copy(content: IO[bytes], path: Path) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    with file:
        while chunk := content.read(CHUNK):
            with writing(path):
                file.write(chunk)


def _zip_files(archive: Path, budget: _Budget) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as zipped:
        members = [member for member in zipped.infolist() if not member.is_dir()]
        for member in members:
            if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
                raise ArchiveError(f"{archive}: {member.filename!r} is a link or a device; nothing was unpacked.")
            budget.take(member.file_size)
        for member in members:
            yield member.filename, zipped.open(member)


def _tar_files(archive: Path, budget: _Budget) -> Iterator[tuple[str, IO[bytes]]]:
    with ExitStack() as files:
        stream = _Stream(files.enter_context(_decompressed(archive)))
        tarred = files.enter_context(tarfile.open(fileobj=stream, mode="r:"))  # type: ignore[call-overload]
        for member in tarred:
            if member.isdir():
                continue
            content = tarred.extractfile(member) if member.isreg() and not member.issparse() else None
            if content is None:
                what = "a sparse file" if member.issparse() else "a link or a device"
                raise ArchiveError(f"{archive}: {member.name!r} is {what}. The archive was not unpacked.")
            if member.size < 0:
                raise tarfile.ReadError(f"{member.name!r} has a negative size")
            budget.take(member.size)
            yield member.name, content
        stream.seek(tarred.offset)
        if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile treats a damaged header as the end
            raise ArchiveError(f"{archive} cannot be unpacked (it is truncated or damaged).")
        while stream.read(CHUNK):  # checksums are compared when the end is read
            pass


class _Stream:
    """A file that limits the size of reads, because a damaged header may request gigabytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= LONGEST_HEADER:
            raise tarfile.ReadError("a header is too long")
        return self.file.read(size)


def _decompressed(archive: Path) -> Any:
    with archive.open("rb") as file:
        kind = _COMPRESSED.get(file.read(2))
    return archive.open("rb") if kind is None else kind(archive, "rb")


def _place(archive: Path, folder: Path, name: str) -> Path | None:
    """Return the path of a member, or None for macOS metadata. Raise an error for paths outside of the folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts or ":" in path.parts[0]:
        raise ArchiveError(f"{archive}: {name!r} would be written outside of the folder. The archive was not unpacked.")
    if path.parts[0] in CLUTTER or path.name in CLUTTER or path.name.startswith("._"):
        return None
    return folder.joinpath(*path.parts)
