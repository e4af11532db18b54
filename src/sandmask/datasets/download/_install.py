"""Download a dataset and install its folder atomically."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sandmask.datasets.download._extract import ArchiveError, extract, is_archive
from sandmask.datasets.download._http import MirrorError, Patience, discard, fetch, fetch_from_drive
from sandmask.datasets.download._verify import Ledger, Verification, sole_user, verify
from sandmask.datasets.sources import DRIVE, RemoteFile, Source
from sandmask.errors import SandmaskError

FileProgress = Callable[[str, int, int | None], None]  # (file name, bytes so far, total bytes if known)
ARCHIVES = "downloads"


@dataclass(frozen=True)
class Obtained:
    """A downloaded file: its path, its origin and its checksum."""

    path: Path
    origin: str  # a mirror, or "by hand"
    sha256: str


@dataclass(frozen=True)
class Installed:
    """The result of `install`."""

    path: Path
    origins: tuple[str, ...]
    note: str
    verification: Verification


def install(
    source: Source,
    data_dir: Path,
    *,
    replace: bool = False,
    keep_archives: bool = False,
    progress: FileProgress = lambda _name, _done, _total: None,
    patience: Patience | None = None,
) -> Installed:
    """Download, check, unpack and prepare a dataset. Its folder appears by a single rename at the end.

    Archives that are already in data_dir/downloads are used.

    :param source: source of the dataset.
    :param data_dir: folder of the datasets.
    :param replace: replace an existing folder.
    :param keep_archives: keep the downloaded archives.
    :param progress: called with a file's name, the bytes done and the total, if it is known.
    :param patience: retries and timeouts; the defaults if not given.
    """
    with sole_user(data_dir):
        there = source.find(data_dir)
        if there is not None and not replace:
            raise SandmaskError(
                f"{source.name} is already in {there}. Check it with `sandmask data verify {source.name}`, "
                "or download it again with --replace."
            )
        ledger = Ledger(data_dir)
        obtained = [_obtain(source, file, data_dir, ledger, progress, patience) for file in source.files]
        note = _prepare(source, obtained, data_dir)
        for file in obtained:
            ledger.record("archives", file.origin, {"sha256": file.sha256, "bytes": file.path.stat().st_size})
            if not keep_archives:
                file.path.unlink()
        ledger.forget("folders", source.folder)
        target = data_dir / source.folder
        return Installed(target, tuple(file.origin for file in obtained), note, verify(source, data_dir))


def _obtain(
    source: Source,
    file: RemoteFile,
    data_dir: Path,
    ledger: Ledger,
    progress: FileProgress,
    patience: Patience | None,
) -> Obtained:
    archives = data_dir / ARCHIVES
    archives.mkdir(parents=True, exist_ok=True)
    target = archives / file.name
    if target.exists():
        origin = f"by hand: {file.name}"
        try:
            return Obtained(target, origin, check(target, file, origin, ledger))
        except MirrorError as error:
            raise SandmaskError(f"{target} failed its check: {error}. Delete it and try again.") from error
    reasons = []
    for mirror in file.mirrors:
        # Each mirror has its own partial file to resume, also if another mirror was tried in between.
        part = target.with_name(f"{file.name}.{hashlib.sha256(mirror.encode()).hexdigest()[:8]}.part")
        try:
            if mirror.startswith(DRIVE):
                fetch_from_drive(mirror.removeprefix(DRIVE), part, partial(progress, file.name))
            else:
                fetch(mirror, part, partial(progress, file.name), patience)
            digest = _checked(part, file, mirror, ledger)
        except MirrorError as error:
            reasons.append(f"{mirror}: {error}")
            continue
        part.replace(target)
        for leftover in archives.glob(f"{file.name}.*part*"):
            leftover.unlink()
        return Obtained(target, mirror, digest)
    raise SandmaskError(_by_hand(source, file, data_dir, reasons))


def _checked(part: Path, file: RemoteFile, mirror: str, ledger: Ledger) -> str:
    try:
        return check(part, file, mirror, ledger)
    except MirrorError:
        discard(part)  # otherwise, the next attempt would resume a wrong file
        raise


def check(path: Path, file: RemoteFile, origin: str, ledger: Ledger) -> str:
    """Check a file against everything that is known about it, and return its sha256."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        raise MirrorError(f"it has {size:,} bytes instead of {file.size:,}")
    if file.md5 is not None and _digest(path, "md5") != file.md5:
        raise MirrorError(f"its md5 is not {file.md5}")
    digest = _digest(path, "sha256")
    seen = ledger.get("archives", origin)
    if seen is not None and seen["sha256"] != digest:
        raise MirrorError(
            f"it is not the file that was first seen there (sha256 {seen['sha256'][:12]}... then, "
            f"{digest[:12]}... now; if you trust the new file, remove the entry from {ledger.path})"
        )
    if file.archive and not is_archive(path):
        raise MirrorError("it is not a zip or tar archive, but perhaps a web page")
    return digest


def _prepare(source: Source, obtained: list[Obtained], data_dir: Path) -> str:
    """Unpack and prepare a dataset in a temporary folder, and rename it. Return a note for the user."""
    workshop = data_dir / f".{source.folder}.preparing"
    shutil.rmtree(workshop, ignore_errors=True)  # left by a process that was killed
    extracted, ready = workshop / "extracted", workshop / "ready"
    extracted.mkdir(parents=True)
    try:
        for file, remote in zip(obtained, source.files, strict=True):
            _unpack(file, remote, extracted)
        note = source.prepare(extracted, ready)
        _put_in_place(ready, data_dir / source.folder, workshop / "replaced")
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return note


def _put_in_place(ready: Path, target: Path, replaced: Path) -> None:
    """Rename `ready` to `target`. An existing folder is moved to `replaced`, and back if the renaming fails."""
    if target.exists():
        target.rename(replaced)
    try:
        ready.rename(target)
    except BaseException:
        if replaced.exists():
            replaced.rename(target)
        raise


def _unpack(file: Obtained, remote: RemoteFile, folder: Path) -> None:
    if not remote.archive:
        shutil.copyfile(file.path, folder / remote.name)
        return
    try:
        extract(file.path, folder)
    except ArchiveError as error:
        if file.origin.startswith("by hand"):
            raise
        file.path.unlink()
        raise SandmaskError(f"{error} It came from {file.origin} and was deleted; try again.") from error


def _by_hand(source: Source, file: RemoteFile, data_dir: Path, reasons: list[str]) -> str:
    """Return instructions for the case that no mirror works."""
    web = "https://drive.google.com/file/d/"
    addresses = " or ".join(mirror.replace(DRIVE, web) for mirror in file.mirrors)
    layout = f"{data_dir / source.folder}/"
    if source.images is not None:
        layout += source.images.layout or f"<domain>/<class>/ ({', '.join(source.images.domains)})"
    return (
        f"{file.name} of {source.name} could not be downloaded ({'; '.join(reasons)}). To do it by hand, "
        f"fetch {addresses}, save it as {data_dir / ARCHIVES / file.name} and run the command again, "
        f"or put the data itself into {layout}."
    )


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()
