import io
import random
import shutil
import stat
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from sandmask.datasets.download import ArchiveError, _extract, extract
from sandmask.datasets.download._extract import is_archive
from sandmask.errors import SandmaskError

FILES = {"set/a/1.jpg": b"one", "set/b/2.jpg": b"two" * 1000}
ESCAPES = ["../evil", "/tmp/evil", "a/../../evil", "..\\evil", "C:\\evil", "C:/evil", "\\evil"]


def make_zip(path: Path, files: dict[str, bytes], mode: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            member = zipfile.ZipInfo(name)
            member.filename = name  # ZipInfo tidies names up; an attacker would not
            member.external_attr = mode << 16
            archive.writestr(member, content)
    return path


def make_tar(path: Path, files: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = "/etc/passwd"
            member.size = len(content) if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(content))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_files_are_unpacked(tmp_path: Path, make: type) -> None:
    clutter = {"__MACOSX/set/._1.jpg": b"x", "set/.DS_Store": b"x", "set/a/._1.jpg": b"x"}
    archive = make(tmp_path / "archive", {**FILES, **clutter})
    assert extract(archive, tmp_path / "out") == 2
    assert contents(tmp_path / "out") == FILES


def test_folders_in_archives_are_no_files(tmp_path: Path) -> None:
    source = tmp_path / "source" / "set"
    source.mkdir(parents=True)
    (source / "1.jpg").write_bytes(b"one")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(source, "set")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive_:
        archive_.writestr("set/", "")
        archive_.writestr("set/1.jpg", b"one")
    for name in ("x.tar", "x.zip"):
        assert extract(tmp_path / name, tmp_path / f"out-{name}") == 1


@pytest.mark.parametrize("make", [make_zip, make_tar])
@pytest.mark.parametrize("name", ESCAPES)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, make: type, name: str) -> None:
    archive = make(tmp_path / "archive", {name: b"evil"})
    with pytest.raises(ArchiveError, match="outside of the folder"):
        extract(archive, tmp_path / "in" / "out")
    assert contents(tmp_path / "in") == {}
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_a_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    archive = make_tar(tmp_path / "archive", {"link": b""}, kind)
    with pytest.raises(ArchiveError, match="'link' is a link or a device"):
        extract(archive, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_links_in_a_zip_are_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "archive", {"link": b"/etc/passwd"}, stat.S_IFLNK | 0o777)
    with pytest.raises(ArchiveError, match="'link' is a link or a device"):
        extract(archive, tmp_path / "out")


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_damage_is_named(tmp_path: Path, make: type) -> None:
    archive = make(tmp_path / "archive", {"a": bytes(range(256)) * 100, "b": b"x"})
    whole = archive.read_bytes()
    middle = len(whole) // 3
    archive.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    with pytest.raises(ArchiveError, match=f"{archive} cannot be unpacked"):
        extract(archive, tmp_path / "out")
    archive.write_bytes(b"<html>Sorry</html>")
    with pytest.raises(ArchiveError, match=f"{archive} cannot be unpacked"):
        extract(archive, tmp_path / "out")


def survives(archive: Path, folder: Path, expected: dict[str, bytes]) -> bool:
    """Whether an archive is unpacked; if so, to what was put in."""
    try:
        extract(archive, folder)
    except ArchiveError:
        return False
    assert contents(folder) == expected
    return True


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_a_flipped_bit_does_not_go_unnoticed(tmp_path: Path, suffix: str) -> None:
    draws = random.Random(0)
    files = {f"set/{i}.jpg": draws.randbytes(700) for i in range(4)}
    archive = tmp_path / "x.tar"
    with tarfile.open(archive, f"w:{suffix}") as tarred:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tarred.addfile(member, io.BytesIO(content))
    whole = archive.read_bytes()
    unnoticed = 0
    for number in range(60):
        flipped = bytearray(whole)
        place = draws.randrange(20, len(whole))  # after the header, whose time and name do not matter
        flipped[place] ^= 1 << draws.randrange(8)
        archive.write_bytes(flipped)
        unnoticed += survives(archive, tmp_path / str(number), files)
    assert unnoticed <= 1  # padding in the last byte of a stream has no meaning


@pytest.mark.parametrize("mode", ["w:gz", "w"])
def test_a_truncated_archive_is_noticed(tmp_path: Path, mode: str) -> None:
    archive = tmp_path / "x.tar"
    files = {f"set/{i}.jpg": bytes([i]) * 512 for i in range(4)}
    with tarfile.open(archive, mode) as tarred:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tarred.addfile(member, io.BytesIO(content))
    whole = archive.read_bytes()
    cuts = range(len(whole) // 20, len(whole), len(whole) // 20) if mode == "w:gz" else (512, 1024, 1536, 2048, 4096)
    for cut in cuts:
        archive.write_bytes(whole[:cut])
        assert not survives(archive, tmp_path / str(cut), files)


def test_a_damaged_header_does_not_end_an_archive(tmp_path: Path) -> None:
    archive = tmp_path / "x.tar"
    with tarfile.open(archive, "w") as tarred:
        for name in ("a", "b", "c"):
            tarred.addfile(tarfile.TarInfo(name), io.BytesIO())
    whole = bytearray(archive.read_bytes())
    whole[512 + 100] ^= 1
    archive.write_bytes(whole)
    with pytest.raises(ArchiveError, match="truncated or damaged"):
        extract(archive, tmp_path / "out")


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_more_than_an_archive_of_its_size_can_hold(tmp_path: Path, make: type, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make(tmp_path / "bomb", {f"{i}.jpg": bytes(100_000) for i in range(10)})
    monkeypatch.setattr(_extract, "ALLOWANCE", 500_000)
    monkeypatch.setattr(_extract, "MOST_EXPANSION", 0)
    with pytest.raises(ArchiveError, match="too much for an archive of its size"):
        extract(archive, tmp_path / "out")
    assert sum(map(len, contents(tmp_path / "out").values())) <= 500_000


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_more_than_the_disk_has_room_for(tmp_path: Path, make: type, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make(tmp_path / "large", {"1.jpg": bytes(1_000_000)})
    room = shutil.disk_usage(tmp_path)._replace(free=_extract.RESERVE + 500_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    with pytest.raises(SandmaskError, match=r"needs at least 1,000,000 bytes.*room for 500,000") as caught:
        extract(archive, tmp_path / "out")
    assert not isinstance(caught.value, ArchiveError)  # the archive is fine, and is kept
    assert contents(tmp_path / "out") == {}


def test_a_sparse_file_is_refused(tmp_path: Path) -> None:
    header = bytearray(tarfile.TarInfo("huge.jpg").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[483:495] = b"%011o " % 2**32  # its real size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    (tmp_path / "sparse.tar").write_bytes(bytes(header[:512]) + bytes(1024))
    with pytest.raises(ArchiveError, match=r"'huge\.jpg' is a sparse file"):
        extract(tmp_path / "sparse.tar", tmp_path / "out")
    assert contents(tmp_path / "out") == {}


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED])
def test_damage_in_a_zip_of_any_method(tmp_path: Path, method: int) -> None:
    archive = tmp_path / "x.zip"
    with zipfile.ZipFile(archive, "w", method) as zipped:
        zipped.writestr("1.jpg", random.Random(0).randbytes(5000))
    whole = bytearray(archive.read_bytes())
    whole[60:1000] = bytes(940)
    archive.write_bytes(whole)
    with pytest.raises(ArchiveError, match="cannot be unpacked"):
        extract(archive, tmp_path / "out")


def test_a_method_that_python_does_not_know(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "x.zip", FILES)
    whole = archive.read_bytes()
    for signature, place in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        at = whole.index(signature) + place
        whole = whole[:at] + struct.pack("<H", 9) + whole[at + 2 :]  # Deflate64
    archive.write_bytes(whole)
    with pytest.raises(ArchiveError, match="compression"):
        extract(archive, tmp_path / "out")


def test_files_that_only_look_like_archives(tmp_path: Path) -> None:
    for start in (b"\x1f\x8b", b"BZh9", b"\xfd7zXZ\0", b"PK\3\4", b""):
        (tmp_path / "x").write_bytes(start + b"nothing")
        assert not is_archive(tmp_path / "x")
        with pytest.raises(ArchiveError):
            extract(tmp_path / "x", tmp_path / "out")
