import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from sandmask.datasets.download import ArchiveError, extract

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
