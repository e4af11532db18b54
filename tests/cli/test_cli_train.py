"""`sandmask train` as a user runs it."""

import io
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from sandmask.api import _progress
from sandmask.api._images import allowances
from sandmask.cli._app import app
from sandmask.datasets import DATASETS, dataset_entry
from sandmask.errors import SandmaskError
from sandmask.records import read_runs
from sandmask.sweeps import _job
from sandmask.training import make_spec

SMALL = ("--hparam", "mlp_width=8", "--hparam", "batch_size=4", "--device", "cpu")


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_trains_and_prints_a_table(tmp_path: Path) -> None:
    result = run("debugvector", "erm", "--test-env", "B", "--steps", "3", "--out", str(tmp_path), *SMALL)
    assert "ERM on DebugVector, after step 2" in result.stdout
    assert "held out" in result.stdout
    assert "loss" in result.stderr
    assert (tmp_path / "model.safetensors").exists()


def test_json_for_scripts(tmp_path: Path) -> None:
    arguments = ("DebugVector", "ANDMask", "--test-env", "1", "--test-env", "b", "--steps", "3", *SMALL)
    result = run(*arguments, "--out", str(tmp_path), "--json")
    summary = json.loads(result.stdout)
    assert summary["status"] == "done"
    assert summary["spec"]["test_envs"] == [1]
    assert summary["accuracy"]["b"]["held_out"]
    assert not result.stderr


def test_exchanged_names_are_understood(tmp_path: Path) -> None:
    arguments = ("--test-env", "B", "--steps", "1", *SMALL, "--out", str(tmp_path), "--json")
    result = run("ERM", "DebugVector", *arguments)
    assert json.loads(result.stdout)["spec"]["dataset"] == "DebugVector"
    assert result.stderr == "note: read as ERM on DebugVector. `sandmask train` takes the dataset first.\n"


def test_default_folder_is_named_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("DebugVector", "ERM", "--test-env", "a", "--steps", "1", *SMALL)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("DebugVector-ERM-")


def test_a_threshold_that_masks_everything_is_said_aloud(tmp_path: Path) -> None:
    asked = ("DebugVector", "SANDMask", "--test-env", "a", "--steps", "1", *SMALL)
    result = run(*asked, "--space", "paper", "--out", str(tmp_path / "paper"))
    assert "warning: SAND-mask with tau = 1" in result.stderr
    assert "warning" not in run(*asked, "--out", str(tmp_path / "recipe")).stderr


@pytest.mark.parametrize(("algorithm", "name"), [("VREx", "vrex_penalty_anneal_iters"), ("SAM+ANDMask+TRM", "iters")])
def test_a_run_that_ends_before_its_penalty_starts_is_told(algorithm: str, name: str, tmp_path: Path) -> None:
    asked = ("DebugVector", algorithm, "--test-env", "a", "--steps", "3", *SMALL)
    last = run(*asked, "--hparam", f"{name}=3", "--out", str(tmp_path / "late")).stderr
    assert f"warning: {name} = 3 is not reached in 3 steps" in last
    assert "warning" not in run(*asked, "--hparam", f"{name}=2", "--out", str(tmp_path / "reached")).stderr


def test_divergence_has_an_exit_status_of_its_own_and_one_line(tmp_path: Path) -> None:
    arguments = ("DebugVector", "ERM", "--test-env", "a", "--steps", "9", "--hparam", "lr=1e38", *SMALL)
    summary = json.loads(run(*arguments, "--out", str(tmp_path), "--json", code=3).stdout)
    assert summary["status"] == "diverged"
    again = run(*arguments, "--out", str(tmp_path), code=3)
    assert again.stderr.startswith("Diverged at step")
    assert again.stderr.count("\n") == 1


def test_a_finished_run_with_damaged_records_is_trained_again(tmp_path: Path) -> None:
    arguments = ("DebugVector", "ERM", "--test-env", "a", "--steps", "3", "--out", str(tmp_path), *SMALL)
    run(*arguments)
    records = tmp_path / "records.jsonl"
    whole = records.read_bytes()
    records.write_bytes(whole[: len(whole) // 2])
    assert "records.jsonl is damaged" in run(*arguments).stderr
    assert records.read_bytes() == whole
    assert "damaged" not in run(*arguments).stderr


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_shows_how_far_a_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(_progress, "Console", lambda **_: screen)
    monkeypatch.setattr(_progress, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True)))
    run("DebugVector", "SANDMask-rescaled", "--test-env", "a", "--steps", "3", "--out", str(tmp_path), *SMALL)
    last = screen.file.getvalue().rpartition("SANDMask")[2]  # type: ignore[attr-defined]
    assert "3/3" in last
    assert "0:00:00" in last
    assert "loss 0." in last


def test_a_long_evaluation_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count(step=4)
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    spec = make_spec(DATASETS["DebugVector"], "ERM", [0], steps=5)
    with _progress.TrainingBar(spec, "lines") as bar:
        for done in (12_000, 24_000, 36_000, 70_000):
            bar.evaluating(done, 70_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["ERM: step 0/5  evaluating 36,000/70,000"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("DebugVektor", "ERM", "--test-env", "a"), "Did you mean 'DebugVector'?"),
        (("DebugVector", "SANDMsk", "--test-env", "a"), "Did you mean 'SANDMask'?"),
        (("DebugVector", "ERM", "--test-env", "d"), "has no environment 'd'"),
        (("DebugVector", "IRM", "--test-env", "a", "--test-env", "b"), "at least 2 environments to train on"),
        (("DebugVector", "ERM", "--test-env", "a", "--hparam", "lrr=1"), "Did you mean 'lr'?"),
        (("DebugVector", "ERM", "--test-env", "a", "--precision", "fp8"), "Unknown precision 'fp8'"),
        (("DebugVector", "ERM", "--test-env", "a", "--device", "tpu9"), "Device 'tpu9' cannot be used here"),
        (
            ("DebugVector", "ERM", "--test-env", "a", "--device", "meta"),
            "Device 'meta' cannot be used here: Tensor.item() cannot be called on meta tensors. Try --device cpu.",
        ),
        pytest.param(
            ("DebugVector", "ERM", "--test-env", "a", "--device", "mps"),
            "with arguments from the 'MPS' backend. Try --device cpu.",
            marks=pytest.mark.skipif(torch.backends.mps.is_available(), reason="has an Apple GPU"),
        ),
        (
            ("DebugVector", "ERM", "--test-env", "a", "--steps", str(2**63)),
            "steps should be at least 1 and less than 2^63",
        ),
        (
            ("DebugVector", "ERM", "--test-env", "a", "--checkpoint-every", str(10**30)),
            "checkpoint_every should be at least 1 and less than 2^63",
        ),
        (("DebugVector", "ERM", "--test-env", "a", "--network", "resnet5000"), "Unknown network 'resnet5000'"),
        (("DebugVector", "ERM", "--test-env", "a", "--precision", "fp16"), "fp16 supports only gradient masks"),
        (
            ("DebugVector", "ERM", "--test-env", "a", "--steps", "1000000000"),
            "with --checkpoint-every 10000",
        ),
        (("DebugVector", "ERM", "--test-env", "a", "--seed", str(2**63)), "seed should be from 0 to 2^63 - 1"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_2(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments, code=2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A folder of images of which one domain lacks a class."""
    for name in ("north/cat", "north/dog", "south/cat", "west/cat", "west/dog"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (4, 4)).save(tmp_path / name / f"{number}.png")
    return tmp_path


def test_a_domain_may_lack_a_class_where_one_says_so(sparse: Path) -> None:
    arguments = (str(sparse), "ERM", "--test-env", "west", "--device", "tpu9")
    refused = run(*arguments, code=2).stderr
    assert "'dog' is missing in the domain 'south'" in refused
    assert "--missing-classes" in refused
    assert "tpu9" in run(*arguments, "--missing-classes", code=2).stderr, "the data were taken"


def test_in_a_sweep_as_well(sparse: Path) -> None:
    wanted = tuple(allowances(skip_corrupt=False, allow_missing_classes=True))
    name = dataset_entry(str(sparse)).name
    assert _job.planned_dataset(name, str(sparse), None, wanted).classes == ("cat", "dog")
    with pytest.raises(SandmaskError, match="--missing-classes"):
        _job.planned_dataset(name, str(sparse), None, ())


def test_a_folder_that_has_changed_is_loaded_again(sparse: Path) -> None:
    def load(name: str) -> int:
        return len(_job.planned_dataset(name, str(sparse), None, ("allow_missing_classes",)).labels)

    before = dataset_entry(str(sparse)).name
    assert load(before) == 25
    Image.new("RGB", (4, 4), "red").save(sparse / "west" / "cat" / "new.png")
    assert load(dataset_entry(str(sparse)).name) == 26
    _job.planned_dataset.cache_clear()
    with pytest.raises(SandmaskError, match="has different content here than on the machine that planned the sweep"):
        load(before)


def test_diagnostics_are_recorded_and_written_for_tensorboard(tmp_path: Path) -> None:
    arguments = ("DebugVector", "ANDMask", "--test-env", "a", "--steps", "3", "--hparam", "tau=0.5", *SMALL)
    plain = json.loads(run(*arguments, "--out", str(tmp_path / "plain"), "--json").stdout)
    board = tmp_path / "board"
    options = ("--diagnostics", "--tensorboard", str(board), "--out", str(tmp_path / "run"), "--json")
    found = json.loads(run(*arguments, *options).stdout)
    assert {**found, "folder": ""} == {**plain, "folder": ""}, "the same run, to the bit"
    (record,) = read_runs(tmp_path / "run")
    assert {"mask_density/all", "dead_fraction/classifier.weight", "agreement/all/9"} <= record.metrics.keys()
    assert list(board.glob("events.out.tfevents.*"))
    assert "this run is finished" in run(*arguments, *options).stderr


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images of three domains and two classes, in `photos`."""
    for domain in ("a", "b", "c"):
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / domain / name
            folder.mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (32, 32), (80 * number, 40, 40)).save(folder / f"{number}.png")
    return tmp_path / "photos"


IMAGES = (
    "--steps",
    "1",
    "--network",
    "test_resnet",
    "--weights",
    "none",
    "--hparam",
    "batch_size=2",
    "--device",
    "cpu",
)


def test_the_table_names_the_shares_of_splits_that_a_manifest_sets(photos: Path, tmp_path: Path) -> None:
    files = sorted(photos.rglob("*.png"))
    rows = [
        f"{file},{file.parent.name},{file.parent.parent.name},{'out' if n % 2 else 'in'}"
        for n, file in enumerate(files)
    ]
    manifest = tmp_path / "list.csv"
    manifest.write_text("\n".join(["path,class,domain,split", *rows]))
    result = run(str(manifest), "ERM", "--test-env", "a", "--out", str(tmp_path / "run"), *IMAGES)
    assert re.search(r"in \(50%\) +out \(50%\)", result.stdout), result.stdout


def test_says_what_a_folder_holds_and_names_it_without_its_path(photos: Path, tmp_path: Path) -> None:
    (photos / "b" / "dog" / "notes.txt").write_text("x")
    result = run(str(photos), "ERM", "--test-env", "a", "--out", str(tmp_path / "run"), *IMAGES)
    lines = result.stderr.splitlines()
    assert lines[0].endswith(": 18 images, 3 environments, 2 classes")
    assert lines[1:4] == [f"  {name}  6: cat 3, dog 3" for name in "abc"]
    assert lines[4] == "  left out 1 (unknown ending .txt): b/dog/notes.txt"
    (record,) = read_runs(tmp_path / "run" / "records.jsonl")
    assert record.spec.dataset == lines[0].partition(":")[0]
    assert str(tmp_path) not in (tmp_path / "run" / "records.jsonl").read_text()
    assert str(tmp_path).encode() not in (tmp_path / "run" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_corrupt_image_is_found_before_training(photos: Path, tmp_path: Path, command: str) -> None:
    (photos / "c" / "dog" / "2.png").write_bytes(b"x")
    if command == "train":
        result = run(str(photos), "ERM", "--test-env", "a", "--out", str(tmp_path / "run"), *IMAGES, code=2)
    else:
        asked = ("--datasets", str(photos), "--algorithms", "ERM", "--test-envs", "a", "--n-hparams", "1")
        how = ("--n-trials", "1", "--workers", "1", "--no-calibrate", *IMAGES)
        result = CliRunner().invoke(app, ["sweep", "run", str(tmp_path / "run"), *asked, *how])
        assert result.exit_code == 2, result.output
    assert "c/dog/2.png cannot be decoded" in result.stderr
    assert "18 images" in result.stderr
    assert not list((tmp_path / "run").rglob("*records*"))


def test_a_moved_folder_is_the_same_run(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = json.loads(run(str(photos), "ERM", "--test-env", "a", *IMAGES, "--json").stdout)
    (tmp_path / "elsewhere").mkdir()
    photos.rename(tmp_path / "elsewhere" / "photos")
    again = json.loads(run("elsewhere/photos", "ERM", "--test-env", "a", *IMAGES, "--json").stdout)
    assert again == first


def test_a_single_class_is_refused(photos: Path, tmp_path: Path) -> None:
    for domain in ("a", "b", "c"):
        (photos / domain / "dog").rename(tmp_path / f"{domain}-dog")
        for number in range(3):
            Image.new("RGB", (32, 32)).save(photos / domain / "cat" / f"more{number}.png")
    result = run(str(photos), "ERM", "--test-env", "a", *IMAGES, code=2)
    assert "should have at least two classes. Found one: 'cat'" in result.stderr


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    result = run(str(tmp_path / "a\x1b[2Jb"), "ERM", "--test-env", "0", code=2)
    assert r"a\x1b[2Jb" in result.stderr
    assert "\x1b" not in result.stderr
