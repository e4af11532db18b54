from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sandmask.datasets import load_dataset
from sandmask.datasets._prepare import move_domains
from sandmask.datasets.download import Patience, install, verify
from sandmask.datasets.download._verify import Ledger, sole_user
from sandmask.datasets.image_sets import ImageSet
from sandmask.datasets.sources import SOURCES, RemoteFile, Source, downloadable, source_of
from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from tests.datasets.conftest import FlakyServer

QUICK = Patience(tries=2, wait=0.001, timeout=5)
IMAGES = ImageSet("Tiny", "tiny", ("A", "P"), ("art", "photo"), n_classes=2)


@pytest.fixture
def archive(make_folder: Callable[..., Path]) -> bytes:
    """A zip of a small set of images, wrapped in a folder."""
    root = make_folder()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for path in sorted(root.rglob("*.png")):
            file.write(path, f"kfold/{path.relative_to(root)}")
    return packed.getvalue()


def tiny(*mirrors: str, **known: object) -> Source:
    file = RemoteFile("tiny.zip", mirrors, **known)  # type: ignore[arg-type]
    prepare = partial(move_domains, domains=IMAGES.domains)
    return Source("Tiny", "tiny", ("Tiny",), (file,), prepare, IMAGES, {"art": 6, "photo": 6})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_download_check_unpack_and_put_in_place(server: FlakyServer, archive: bytes, tmp_path: Path) -> None:
    url = server.serve("tiny.zip", archive, cuts=[100])
    seen: list[tuple[str, int, int | None]] = []
    home = tmp_path / "home"
    done = install(tiny(url), home, patience=QUICK, progress=lambda *what: seen.append(what))
    assert done.path == home / "tiny"
    assert done.origins == (url,)
    assert done.verification.status == "ok"
    assert done.verification.counts == {"art": 6, "photo": 6}
    assert seen[-1] == ("tiny.zip", len(archive), len(archive))
    assert names(home) == [".sandmask-data.lock", "downloads", "sandmask-data.json", "tiny"]
    assert names(home / "downloads") == []
    assert IMAGES.load(home, image_size=24).bounds == (0, 6, 12)
    assert Ledger(home).get("archives", url) is not None
    with pytest.raises(SandmaskError, match=r"Tiny is already in .*--replace"):
        install(tiny(url), home, patience=QUICK)


def test_a_dead_mirror_falls_to_the_next(server: FlakyServer, archive: bytes, tmp_path: Path) -> None:
    good = server.serve("good", archive)
    bad = [
        server.address("gone"),
        server.serve("trouble", archive, errors=[500] * 9),
        server.serve("page", b"<html>We have moved</html>"),
        server.serve("short", archive, cuts=[50, 0, 0], ranges=True),
    ]
    done = install(tiny(*bad, good), tmp_path / "home", patience=QUICK)
    assert done.origins == (good,)
    assert names(tmp_path / "home" / "downloads") == []


def test_wrong_bytes_are_not_taken(server: FlakyServer, archive: bytes, tmp_path: Path) -> None:
    wrong = archive[:-1] + b"?"
    urls = server.serve("wrong", wrong), server.serve("right", archive)
    md5 = hashlib.md5(archive).hexdigest()
    done = install(tiny(*urls, md5=md5), tmp_path / "home", patience=QUICK)
    assert done.origins == (urls[1],)
    with pytest.raises(SandmaskError, match="it has 3 bytes instead of 4"):
        install(tiny(server.serve("x", b"abc"), size=4), tmp_path / "other", patience=QUICK)


def test_when_all_fail_the_message_says_what_to_do(server: FlakyServer, tmp_path: Path) -> None:
    urls = server.address("gone"), server.serve("page", b"<html></html>")
    with pytest.raises(SandmaskError) as caught:
        install(tiny(*urls), tmp_path / "home", patience=QUICK)
    message = str(caught.value)
    for part in (
        *urls,
        "HTTP 404",
        "not a zip or tar",
        str(tmp_path / "home/downloads/tiny.zip"),
        str(tmp_path / "home/tiny"),
    ):
        assert part in message
    assert "\n" not in message


def test_an_archive_put_there_by_hand_is_used(archive: bytes, tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "tiny.zip").write_bytes(archive)
    done = install(tiny("http://127.0.0.1:9/never"), tmp_path, keep_archives=True)
    assert done.origins == ("by hand: tiny.zip",)
    assert names(tmp_path / "downloads") == ["tiny.zip"]


def test_a_wrong_archive_put_there_by_hand_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "tiny.zip").write_bytes(b"<html>")
    with pytest.raises(SandmaskError, match=r"downloads/tiny\.zip failed its check.*Delete it"):
        install(tiny("http://127.0.0.1:9/never"), tmp_path)
    assert names(tmp_path / "downloads") == ["tiny.zip"]


def test_what_was_first_seen_is_compared_from_then_on(server: FlakyServer, archive: bytes, tmp_path: Path) -> None:
    url = server.serve("tiny.zip", archive)
    install(tiny(url), tmp_path, patience=QUICK)
    other = io.BytesIO(archive)
    with zipfile.ZipFile(other, "a") as file:
        file.writestr("kfold/note.txt", "changed upstream")
    server.serve("tiny.zip", other.getvalue())
    with pytest.raises(SandmaskError, match="not the file that was first seen there"):
        install(tiny(url), tmp_path, replace=True, patience=QUICK)
    assert verify(tiny(url), tmp_path).status == "ok"  # the old one is still in place
    Ledger(tmp_path).forget("archives", url)
    install(tiny(url), tmp_path, replace=True, patience=QUICK)


def test_a_failed_preparation_leaves_nothing_half_done(server: FlakyServer, archive: bytes, tmp_path: Path) -> None:
    url = server.serve("tiny.zip", archive)
    source = replace(tiny(url), prepare=partial(move_domains, domains=("art", "sculpture")))
    with pytest.raises(SandmaskError, match="sculpture"):
        install(source, tmp_path / "home", patience=QUICK)
    assert names(tmp_path / "home") == [".sandmask-data.lock", "downloads"]
    assert names(tmp_path / "home" / "downloads") == ["tiny.zip"]  # whole and checked: the next try uses it
    assert install(tiny(url), tmp_path / "home", patience=QUICK).verification.status == "ok"


def test_what_a_killed_run_left_is_cleared(server: FlakyServer, archive: bytes, tmp_path: Path) -> None:
    leftover = tmp_path / ".tiny.preparing" / "extracted" / "art" / "old"
    leftover.mkdir(parents=True)
    (leftover / "1.png").touch()
    done = install(tiny(server.serve("tiny.zip", archive)), tmp_path, patience=QUICK)
    assert done.verification.counts == {"art": 6, "photo": 6}
    assert not (tmp_path / "tiny" / "art" / "old").exists()


def test_a_damaged_archive_is_deleted_so_that_the_next_try_fetches_it(
    server: FlakyServer, archive: bytes, tmp_path: Path
) -> None:
    middle = archive.index(b"kfold") + 60
    url = server.serve("tiny.zip", archive[:middle] + bytes(20) + archive[middle + 20 :])
    with pytest.raises(SandmaskError, match=r"cannot be unpacked.*was deleted; try again"):
        install(tiny(url), tmp_path / "home", patience=QUICK)
    assert names(tmp_path / "home" / "downloads") == []
    server.serve("tiny.zip", archive)
    install(tiny(url), tmp_path / "home", patience=QUICK)


def test_replacing_swaps_the_folder(server: FlakyServer, archive: bytes, tmp_path: Path) -> None:
    url = server.serve("tiny.zip", archive)
    install(tiny(url), tmp_path, patience=QUICK)
    (tmp_path / "tiny" / "art" / "cat" / "mine.txt").touch()
    install(tiny(url), tmp_path, replace=True, patience=QUICK)
    assert not (tmp_path / "tiny" / "art" / "cat" / "mine.txt").exists()


def test_google_drive_and_http_mirrors_together(
    server: FlakyServer, archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serve("uc", archive)
    monkeypatch.setattr("sandmask.datasets.download._http.DRIVE_ADDRESS", server.address("uc?id={id}"))
    done = install(tiny(server.address("gone"), "gdrive:abc"), tmp_path, patience=QUICK)
    assert done.origins == ("gdrive:abc",)


def test_one_download_at_a_time(server: FlakyServer, archive: bytes, tmp_path: Path) -> None:
    source = tiny(server.serve("tiny.zip", archive))
    with sole_user(tmp_path), pytest.raises(SandmaskError, match="Another `sandmask data` command is working"):
        install(source, tmp_path, patience=QUICK)
    install(source, tmp_path, patience=QUICK)


def test_verify_notices_what_changed(server: FlakyServer, archive: bytes, tmp_path: Path) -> None:
    source = tiny(server.serve("tiny.zip", archive))
    assert verify(source, tmp_path).status == "missing"
    install(source, tmp_path, patience=QUICK)
    assert verify(source, tmp_path, contents=True).status == "ok"
    victim = tmp_path / "tiny" / "art" / "cat" / "1.png"
    whole = victim.read_bytes()

    victim.write_bytes(whole[:-900] + bytes(900))  # same name, same size
    assert verify(source, tmp_path).status == "ok"
    found = verify(source, tmp_path, contents=True)
    assert found.status == "wrong"
    assert any("1.png cannot be decoded" in problem for problem in found.problems)
    assert any("contents of the files are not those" in problem for problem in found.problems)

    victim.write_bytes(whole[:-1])
    assert any("names and sizes" in problem for problem in verify(source, tmp_path).problems)
    victim.unlink()
    assert "art has 5 images, and Tiny has 6 there" in verify(source, tmp_path).problems
    for path in (tmp_path / "tiny" / "photo" / "dog").iterdir():
        path.unlink()
    assert "'dog' is missing in the domain 'photo'" in verify(source, tmp_path).problems[0]


def test_wrong_data_is_not_recorded_as_first_seen(archive: bytes, tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "tiny.zip").write_bytes(archive)
    source = replace(tiny("http://127.0.0.1:9/never"), counts={"art": 7, "photo": 6})
    assert install(source, tmp_path).verification.status == "wrong"
    assert Ledger(tmp_path).get("folders", "tiny") is None


def _record(folder: Path, key: str) -> None:
    Ledger(folder).record("archives", key, {"sha256": key})


def test_the_ledger_is_always_whole(tmp_path: Path) -> None:
    for i in range(20):
        _record(tmp_path, str(i))
        assert len(json.loads((tmp_path / "sandmask-data.json").read_text())["archives"]) == i + 1
    assert names(tmp_path) == ["sandmask-data.json"]
    (tmp_path / "sandmask-data.json").write_text("{")
    with pytest.raises(SandmaskError, match=r"sandmask-data\.json cannot be read"):
        Ledger(tmp_path).get("archives", "1")


def test_a_folder_that_cannot_be_written_to(
    server: FlakyServer, archive: bytes, tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    source = tiny(server.serve("tiny.zip", archive))
    (tmp_path / "file").touch()
    with pytest.raises(SandmaskError, match="file/home cannot be written to"):
        install(source, tmp_path / "file" / "home", patience=QUICK)
    home = tmp_path / "home"
    make_folder(root=home / "tiny")
    (home / f".sandmask-data.json.{os.getpid()}.tmp").mkdir()  # in the way of the ledger
    found = verify(source, home)
    assert found.status == "ok"
    assert "not recorded" in found.notes[0]


def test_sources_cover_every_dataset_that_is_not_generated() -> None:
    assert downloadable() == [
        "ColoredMNIST", "RotatedMNIST", "VLCS", "PACS", "OfficeHome", "TerraIncognita", "DomainNet", "SVIRO",
        "WILDSCamelyon", "WILDSFMoW", "SpawriousO2O_easy", "SpawriousO2O_medium", "SpawriousO2O_hard",
        "SpawriousM2M_easy", "SpawriousM2M_medium", "SpawriousM2M_hard", "MNIST", "Spawrious",
    ]  # fmt: skip
    assert source_of("coloredmnist") is source_of("MNIST") is SOURCES["MNIST"]
    assert source_of("pacs").name == "PACS"
    with pytest.raises(SandmaskError, match="Spirals is generated"):
        source_of("Spirals")
    with pytest.raises(SandmaskError, match="Did you mean 'PACS'"):
        source_of("PCAS")
    for source in SOURCES.values():
        for file in source.files:
            assert all(mirror.startswith(("https://", "http://", "gdrive:")) for mirror in file.mirrors)
        if source.images is not None:
            assert tuple(source.counts) in ((), source.images.domains)


def test_mnist_files_are_moved_as_they_are(tmp_path: Path) -> None:
    extracted = tmp_path / "in"
    extracted.mkdir()
    for file in SOURCES["MNIST"].files:
        (extracted / file.name).write_text(file.name)
    SOURCES["MNIST"].prepare(extracted, tmp_path / "mnist")
    assert names(tmp_path / "mnist") == sorted(file.name for file in SOURCES["MNIST"].files)


def test_the_paper_sets_load_through_the_registry(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match="sandmask data download VLCS"):
        load_dataset("VLCS", tmp_path)


def test_a_damaged_tar_leaves_what_was_there(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    home, packed = tmp_path / "home", io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tarred:
        tarred.add(make_folder(), "set")
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "tiny.zip").write_bytes(packed.getvalue())
    install(tiny("http://127.0.0.1:1/x"), home, keep_archives=True)
    before = {path: path.read_bytes() for path in (home / "tiny").rglob("*.png")}
    flipped = bytearray(packed.getvalue())
    flipped[-5] ^= 1  # in the checksum at the end, which only a reader of the whole file compares
    (home / "downloads" / "tiny.zip").write_bytes(flipped)
    Ledger(home).forget("archives", "by hand: tiny.zip")
    with pytest.raises(SandmaskError, match="CRC check failed"):
        install(tiny("http://127.0.0.1:1/x"), home, replace=True)
    assert {path: path.read_bytes() for path in (home / "tiny").rglob("*.png")} == before


def test_what_is_replaced_comes_back_if_that_fails(
    server: FlakyServer, archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, home = tiny(server.serve("tiny.zip", archive)), tmp_path / "home"
    install(source, home, patience=QUICK)
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name == "ready":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        install(source, home, replace=True, patience=QUICK)
    assert names(home / "tiny") == ["art", "photo"]
