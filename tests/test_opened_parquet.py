"""Parquet files are read in the calling thread: Arrow's threads may outlive a read and abort a process that ends."""

import io
import threading
from pathlib import Path

import pandas as pd
import pytest

from sandmask.datasets.manifest import Table
from sandmask.records import read_runs, write_archive
from sandmask.records.testing import made_up_sweep


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that read files which were opened by a path."""
    found: set[int] = set()

    class Recorded(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            found.add(threading.get_ident())
            return super().read(size)

    def opened(path: Path, mode: str) -> Recorded:
        return Recorded(path, mode)

    monkeypatch.setattr(Path, "open", opened)
    return found


def test_an_archive_is_read_in_the_calling_thread(tmp_path: Path, readers: set[int]) -> None:
    path = tmp_path / "all.records.parquet"
    write_archive(made_up_sweep(["ERM"]), path)
    assert read_runs(path)
    assert readers == {threading.get_ident()}


def test_a_manifest_is_read_in_the_calling_thread(tmp_path: Path, readers: set[int]) -> None:
    path = tmp_path / "scans.parquet"
    pd.DataFrame({"path": ["a.png"], "class": ["x"], "domain": ["y"]}).to_parquet(path)
    assert list(Table(path).rows(["path", "domain"])) == [(1, ["a.png", "y"])]
    assert readers == {threading.get_ident()}
