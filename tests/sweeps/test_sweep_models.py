"""A sweep's kept models, from the folder to the commands that use them."""

import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sandmask
from sandmask.api import Sweep
from sandmask.cli._app import app
from sandmask.datasets import load_dataset
from sandmask.errors import SandmaskError
from sandmask.records import read_runs
from sandmask.sweeps import (
    JobOptions,
    SweepFolder,
    SweepSpec,
    expand,
    read_sweep,
    refused_changes,
    run_sweep,
    to_toml,
)
from sandmask.training import kept_models, load_run

Small = Callable[..., SweepSpec]
SIZES = {"mlp_width": 8, "batch_size": 8}


class Elsewhere(Executor):
    """Runs jobs at once, in a folder that the driver does not see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def submit(self, function: Any, /, job: Any, *_: Any, **__: Any) -> Future[Any]:  # type: ignore[override]
        from dataclasses import replace

        future: Future[Any] = Future()
        future.set_result(function(replace(job, options=replace(job.options, folder=str(self.folder)))))
        return future


@pytest.fixture
def kept(folder: SweepFolder, small_sweep: Small, tmp_path: Path) -> SweepFolder:
    """A sweep whose worker has a disk of its own, so that its files come back with the outcome."""
    sweep = small_sweep(keep_models="best", metrics=("f1",), averages=("sma",), algorithms=("ERM",), hparams=SIZES)
    folder.accept(sweep)
    options = JobOptions(
        str(folder.path), device="cpu", carry=True, keep_models=sweep.keep_models, metrics=sweep.metrics
    )
    result = run_sweep(folder, expand(sweep), options, lambda: Elsewhere(tmp_path / "worker"), len)
    assert result.failed == {}
    return folder


def test_every_run_has_its_models_and_they_predict(kept: SweepFolder, tmp_path: Path) -> None:
    runs = {run.spec.id: run for run in read_runs(kept.path)}
    models = list(kept_models(kept.path))
    assert sorted((model.spec.id, model.kind) for model in models) == sorted(
        (run, kind) for run in runs for kind in ("weights", "sma")
    )
    run = models[0].spec.id
    x = load_dataset("DebugVector").inputs(torch.arange(3)).numpy()
    np.savetxt(tmp_path / "x.csv", x, delimiter=",")
    words = ["predict", str(kept.path), str(tmp_path / "x.csv"), "--run", run[:8], "--average", "sma", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    expected = load_run(kept.path, run=run, average="sma").predict(x)
    assert [row["probability"] for row in json.loads(done.stdout)] == pytest.approx(expected.amax(-1).tolist())
    assert load_run(kept.path, run=run).record().spec == runs[run].spec
    done = CliRunner().invoke(app, ["export", str(kept.path), "--run", run, "--output", str(tmp_path / "m.pt2")])
    assert done.exit_code == 0, done.output
    exported = torch.export.load(tmp_path / "m.pt2").module()
    torch.testing.assert_close(exported(torch.from_numpy(x)), load_run(kept.path, run=run).logits(x))


def test_the_models_are_listed(kept: SweepFolder) -> None:
    done = CliRunner().invoke(app, ["sweep", "models", str(kept.path), "--json"])
    rows = json.loads(done.stdout)
    assert len(rows) == 12
    records = {run.spec.id: run for run in read_runs(kept.path)}
    for row in rows:
        if row["average"] is None:
            record = records[row["run"]]
            values = record.accuracy_out[:, record.train_envs].mean(1)
            assert row["validation"] == pytest.approx(values.max())
            assert row["step"] == record.steps[values.argmax()]
    for model in Sweep.read(kept.path).models().to_dict("records"):  # as documented: what a row says loads its model
        assert load_run(kept.path, run=model["run"], average=model["average"]).info.average == model["average"]
    assert "12 models" in CliRunner().invoke(app, ["sweep", "models", str(kept.path)]).stdout


def test_damaged_metadata_of_models_are_reported(kept: SweepFolder) -> None:
    file = next(kept.stacks.glob("*.models.safetensors"))
    content = file.read_bytes()
    for old in (b"hparams", b"trial_seed"):
        assert old in content
        file.write_bytes(content.replace(old, old.upper()))  # as a flipped bit would
        for read in (Sweep.read(kept.path).models, lambda: sandmask.load_run(kept.path, run="a")):
            with pytest.raises(SandmaskError, match=r"is damaged: its checksum does not match. Delete it"):
                read()


def test_what_to_keep_is_part_of_the_sweep(small_sweep: Small, tmp_path: Path) -> None:
    plain, keeps = small_sweep(), small_sweep(keep_models="last", shared_init=True, metrics=("ece", "f1"))
    (tmp_path / "s.toml").write_text(to_toml(keeps))
    assert SweepSpec(**read_sweep(tmp_path / "s.toml")) == keeps
    assert keeps.metrics == ("f1", "ece")
    assert "keep_models" not in to_toml(plain), "older versions could not read it"
    reasons = refused_changes(plain, keeps)
    assert any("keep_models is none there, but last was requested" in reason for reason in reasons)
    same = small_sweep(keep_models="last", metrics=("f1",))
    assert [run.id for run in expand(plain).runs] == [run.id for run in expand(same).runs]
    with pytest.raises(SandmaskError, match="keep_models should be one of none, best, last"):
        small_sweep(keep_models="all")
    (tmp_path / "s.toml").write_text('shared_init = "yes"')
    with pytest.raises(SandmaskError, match="shared_init should be true or false"):
        read_sweep(tmp_path / "s.toml")


def test_a_plan_counts_the_models(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"datasets": "DebugVector", "algorithms": "ERM", "n_hparams": 1, "n_trials": 1}
    how: dict[str, Any] = {**asked, "hparams": SIZES, "averages": "sma", "calibrate": False, "device": "cpu"}
    plain, keeps = (sandmask.plan_sweep(tmp_path, **how, keep_models=keep) for keep in ("none", "best"))
    parameters = 3 * (8 * 8 + 8) + 8 * 2 + 2  # three layers of 8 on vectors of 8, and a classifier of two classes
    more = keeps.disk_bytes - plain.disk_bytes
    assert more == pytest.approx(4 * 2 * 3 * parameters)  # weights and SMA of three environments


def test_a_sweep_without_models_says_how_to_keep_them(tmp_path: Path, small_sweep: Small) -> None:
    SweepFolder(tmp_path).accept(small_sweep())
    with pytest.raises(SandmaskError, match="Train the sweep with --keep-models best"):
        sandmask.load_run(tmp_path, run="abc")
