"""Files below a folder, where links lead to other disks, twice to the same place, or in a circle."""

from pathlib import Path

import pytest

import sandmask
from sandmask._files import files_below
from sandmask.api import Sweep
from sandmask.records import read_runs, write_archive
from sandmask.records.testing import made_up_sweep


def _file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_files_are_found_by_their_endings_and_sorted(tmp_path: Path) -> None:
    found = [_file(tmp_path / name) for name in ("a/x.one", "a.one", "b/c/y.two")]
    _file(tmp_path / "b/z.three")
    (tmp_path / "folder.one").mkdir()
    assert files_below(tmp_path, ".one", ".two") == sorted(found)
    assert files_below(tmp_path / "nowhere", ".one") == []


def test_linked_folders_are_searched_once_and_circles_end(tmp_path: Path) -> None:
    inside, outside = _file(tmp_path / "runs/own/x.one"), _file(tmp_path / "disk/deep/y.one")
    links = {"far": tmp_path / "disk", "same": tmp_path / "disk/deep", "up": tmp_path, "self": tmp_path / "runs"}
    for name, target in links.items():
        (tmp_path / "runs" / name).symlink_to(target)
    (tmp_path / "disk" / "back").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "broken.one").symlink_to(tmp_path / "gone")
    found = files_below(tmp_path / "runs", ".one")
    assert len(found) == 3
    assert {path.resolve() for path in found} == {inside, outside, tmp_path / "gone"}


def test_records_of_linked_folders_are_in_tables(tmp_path: Path) -> None:
    runs = made_up_sweep(["ERM", "IRM"])
    for name, some in (("disk", runs[::2]), ("runs/here", runs[1::2])):
        (tmp_path / name).mkdir(parents=True)
        write_archive(some, tmp_path / name / "some.records.parquet")
    (tmp_path / "runs" / "there").symlink_to(tmp_path / "disk")
    assert {run.spec.id for run in read_runs(tmp_path / "runs")} == {run.spec.id for run in runs}


@pytest.mark.parametrize("search", ["none", "optuna"])
def test_a_sweep_ends_where_its_stacks_are_on_another_disk(tmp_path: Path, search: str) -> None:
    """Otherwise its finished runs are not seen, and trained again without end."""
    if search == "optuna":
        pytest.importorskip("optuna")
    (tmp_path / "disk").mkdir()
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "stacks").symlink_to(tmp_path / "disk")
    swept = sandmask.sweep(
        *(folder, "DebugVector", "ERM"),
        test_envs="b",
        n_hparams=1,
        n_trials=1,
        steps=3,
        checkpoint_every=2,
        hparams={"mlp_width": 8, "batch_size": 8},
        search=search,
        keep_models="last",
        workers=1,
        device="cpu",
        calibrate=False,
        progress=False,
    )
    assert (swept.trained, swept.failed) == (1, {})
    assert len(Sweep.read(folder).models()) == 1
    assert len(swept.records()) == 1
