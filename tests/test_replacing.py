import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandmask._files import replacing


def test_what_is_written_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def _fail_halfway(path: Path, error: BaseException) -> None:
    path.write_text("half of")
    raise error


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_what_was_not_written_to_its_end_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(type(error)), replacing(path) as temporary:
        _fail_halfway(temporary, error)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_file_that_did_not_fit(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left") as caught, replacing(tmp_path / "a.txt") as temporary:
        _fail_halfway(temporary, full)
    assert caught.value.filename == str(tmp_path / "a.txt")


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "a.txt"
    with pytest.raises(FileNotFoundError) as caught, replacing(path) as temporary:
        temporary.write_text("words")
    assert caught.value.filename == str(path)


def test_what_went_wrong_first_is_what_one_hears_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("read-only: cannot remove")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="cannot write"), replacing(tmp_path / "a.txt"):
        raise OSError("read-only: cannot write")


def test_a_link_keeps_pointing(tmp_path: Path) -> None:
    path, link = tmp_path / "there" / "a.txt", tmp_path / "link.txt"
    path.parent.mkdir()
    link.symlink_to(path)
    for text in ("new", "newer"):
        with replacing(link) as temporary:
            temporary.write_text(text)
        assert (link.is_symlink(), path.read_text()) == (True, text)
    assert list(path.parent.iterdir()) == [path]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with replacing(path) as temporary:
        temporary.write_text("words")
    assert os.read(reader, 10) == b"words"
    os.close(reader)
    assert (path.is_fifo(), list(tmp_path.iterdir())) == (True, [path])


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, replacing(tmp_path / "a.txt"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(tmp_path / "a.txt")


def test_a_durable_file_and_its_folder_are_synced_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(str(Path(f"/proc/self/fd/{file}").readlink())))
    path = tmp_path / "a.txt"
    with replacing(path, durable=True) as temporary:
        temporary.write_text("new")
    assert synced == [str(temporary), str(tmp_path)]


def test_what_killed_processes_left_behind_is_removed_and_the_files_of_live_ones_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    path = tmp_path / "page.html"
    names = {"dead": dead.pid, "live": os.getppid()}
    leftovers = {name: tmp_path / f".page.html.{process}.tmp" for name, process in names.items()}
    leftovers["other"] = tmp_path / f".other.html.{dead.pid}.tmp"
    for each in leftovers.values():
        each.write_text("half of it")
        os.utime(each, (0, 0))
    with replacing(path) as temporary:
        temporary.write_text("whole")
    assert [name for name, each in leftovers.items() if each.exists()] == ["live", "other"]
