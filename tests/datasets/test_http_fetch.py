from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sandmask.datasets.download import MirrorError, Patience, fetch
from sandmask.datasets.download._http import fetch_from_drive

if TYPE_CHECKING:
    from tests.datasets.conftest import FlakyServer

CONTENT = bytes(range(256)) * 4000
QUICK = Patience(tries=3, wait=0.001, timeout=5)


def get(url: str, part: Path) -> list[tuple[int, int | None]]:
    """Fetch; the progress that was reported."""
    seen: list[tuple[int, int | None]] = []
    fetch(url, part, lambda done, total: seen.append((done, total)), QUICK)
    return seen


def test_whole_file(server: FlakyServer, tmp_path: Path) -> None:
    seen = get(server.serve("x", CONTENT), tmp_path / "x.part")
    assert (tmp_path / "x.part").read_bytes() == CONTENT
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [path.name for path in tmp_path.iterdir()] == ["x.part"]


def test_cut_connections_resume_where_they_stopped(server: FlakyServer, tmp_path: Path) -> None:
    url = server.serve("x", CONTENT, cuts=[1000, 500, 300_000])
    get(url, tmp_path / "x.part")
    assert (tmp_path / "x.part").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=1000-", "bytes=1500-", "bytes=301500-"]


def test_a_server_without_ranges_starts_over(server: FlakyServer, tmp_path: Path) -> None:
    get(server.serve("x", CONTENT, cuts=[1000], ranges=False), tmp_path / "x.part")
    assert (tmp_path / "x.part").read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_a_later_call_resumes(server: FlakyServer, tmp_path: Path) -> None:
    url = server.serve("x", CONTENT, cuts=[1000, 0, 0, 0])
    with pytest.raises(MirrorError, match="cut after 1,000 of 1,024,000 bytes"):
        get(url, tmp_path / "x.part")
    assert (tmp_path / "x.part").stat().st_size == 1000
    server.requests.clear()
    get(url, tmp_path / "x.part")
    assert (tmp_path / "x.part").read_bytes() == CONTENT
    assert server.requests == [("/x", "bytes=1000-")]


def test_a_finished_part_is_not_fetched_again(server: FlakyServer, tmp_path: Path) -> None:
    url = server.serve("x", CONTENT)
    part = tmp_path / "x.part"
    part.write_bytes(CONTENT)
    origin = {"url": url, "version": "v1", "total": len(CONTENT)}
    (tmp_path / "x.part.json").write_text(json.dumps(origin))
    get(url, part)
    assert server.requests == []


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_that_changed_in_between_is_not_mixed(server: FlakyServer, tmp_path: Path, ranges: bool) -> None:
    url = server.serve("x", CONTENT, cuts=[1000, 0, 0, 0])
    with pytest.raises(MirrorError):
        get(url, tmp_path / "x.part")
    server.serve("x", CONTENT[::-1], version="v2", ranges=ranges)
    get(url, tmp_path / "x.part")
    assert (tmp_path / "x.part").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("changed", [CONTENT[:500], CONTENT[::-1][:90_000]])
def test_another_size_shows_a_change_where_versions_are_not_told(
    server: FlakyServer, tmp_path: Path, changed: bytes
) -> None:
    url = server.serve("x", CONTENT, cuts=[1000, 0, 0, 0], version=None)
    with pytest.raises(MirrorError):
        get(url, tmp_path / "x.part")
    server.serve("x", changed, version=None)
    get(url, tmp_path / "x.part")
    assert (tmp_path / "x.part").read_bytes() == changed


def test_a_part_from_elsewhere_is_not_resumed(server: FlakyServer, tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(b"something else")
    get(server.serve("x", CONTENT), tmp_path / "x.part")
    assert (tmp_path / "x.part").read_bytes() == CONTENT


def test_server_errors_pass(server: FlakyServer, tmp_path: Path) -> None:
    get(server.serve("x", CONTENT, errors=[500, 503]), tmp_path / "x.part")
    assert (tmp_path / "x.part").read_bytes() == CONTENT


def test_server_errors_that_stay(server: FlakyServer, tmp_path: Path) -> None:
    with pytest.raises(MirrorError, match="HTTP 500"):
        get(server.serve("x", CONTENT, errors=[500] * 9), tmp_path / "x.part")
    assert len(server.requests) == QUICK.tries


def test_not_found_is_final(server: FlakyServer, tmp_path: Path) -> None:
    with pytest.raises(MirrorError, match="HTTP 404"):
        get(server.address("nothing"), tmp_path / "x.part")
    assert len(server.requests) == 1


def test_no_server(server: FlakyServer, tmp_path: Path) -> None:
    url = server.serve("x", CONTENT)
    server.shutdown()
    server.server_close()
    with pytest.raises(MirrorError, match="refused"):
        get(url, tmp_path / "x.part")


def test_unknown_length(server: FlakyServer, tmp_path: Path) -> None:
    seen = get(server.serve("x", CONTENT, length=False), tmp_path / "x.part")
    assert (tmp_path / "x.part").read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), None)


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    with pytest.raises(MirrorError, match="not an http address"):
        get(f"file://{tmp_path}/secret", tmp_path / "x.part")


@pytest.fixture
def drive(server: FlakyServer, monkeypatch: pytest.MonkeyPatch) -> FlakyServer:
    monkeypatch.setattr("sandmask.datasets.download._http.DRIVE_ADDRESS", server.address("uc?id={id}"))
    return server


def test_drive(drive: FlakyServer, tmp_path: Path) -> None:
    drive.serve("uc", CONTENT)
    seen: list[int] = []
    fetch_from_drive("abc", tmp_path / "x.part", lambda done, _total: seen.append(done))
    assert (tmp_path / "x.part").read_bytes() == CONTENT
    assert seen[-1] == len(CONTENT)


@pytest.mark.usefixtures("drive")
def test_drive_refuses(tmp_path: Path) -> None:
    with pytest.raises(MirrorError):
        fetch_from_drive("abc", tmp_path / "x.part", lambda _done, _total: None)
    assert not (tmp_path / "x.part").exists()
