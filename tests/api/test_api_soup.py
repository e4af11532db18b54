"""`sandmask.soup` against means of weights and logits that are taken by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typer.testing import CliRunner

import sandmask
from sandmask.api import Sweep
from sandmask.cli._app import app
from sandmask.datasets import load_dataset
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, RunSpec, measured, read_runs, split_averages
from sandmask.reports import build_report
from sandmask.sweeps import SweepSpec, expand, write_sweep
from sandmask.training import RunFolder, load_run, split_environment

ASKED: dict[str, Any] = {
    "datasets": "DebugVector",
    "algorithms": "ERM",
    "test_envs": ["b"],
    "n_hparams": 4,
    "n_trials": 1,
    "steps": 5,
    "checkpoint_every": 2,
    "space": "domainbed",
    "hparams": {"mlp_width": 8, "mlp_depth": 3, "batch_size": 8, "dropout": 0, "lr": 0.003, "sma_start": 1},
    "averages": "sma",
    "metrics": "f1",
    "keep_models": "best",
    "shared_init": True,
}
HERE: dict[str, Any] = {"device": "cpu", "workers": 1, "calibrate": False, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("soup") / "sweep"
    sandmask.sweep(place, **ASKED, **HERE)
    return place


@pytest.fixture(scope="module")
def made(folder: Path) -> pd.DataFrame:
    return sandmask.soup(folder, device="cpu")


def modules(folder: Path, average: str | None) -> list[tuple[RunSpec, nn.Module]]:
    """The kept models of all draws as ordinary modules."""
    kept = Sweep.read(folder).models()
    ids = kept["run"].unique()
    loaded = [load_run(folder, run=run, average=average) for run in ids]
    return [(run.spec, run.module()) for run in loaded]


def mean_of(some: list[nn.Module]) -> dict[str, Tensor]:
    states = [module.state_dict() for module in some]
    return {name: torch.stack([state[name].double() for state in states]).mean(0).float() for name in states[0]}


def soup_of(some: list[nn.Module], folder: Path) -> nn.Module:
    model = load_run(folder, run=Sweep.read(folder).models()["run"][0]).module()
    model.load_state_dict(mean_of(some))
    return model


class Ensemble(nn.Module):
    def __init__(self, some: list[nn.Module]) -> None:
        super().__init__()
        self.some = nn.ModuleList(some)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([one(x) for one in self.some]).mean(0)


@torch.no_grad()
def accuracies(model: nn.Module) -> NDArray[np.float64]:
    """[2, environments]: "in", "out"."""
    data = load_dataset("DebugVector")
    found = np.zeros((2, len(data.environments)))
    for env in range(len(data.environments)):
        for split, numbers in enumerate(split_environment(data, env, 0)):
            answers = model(data.inputs(numbers)).argmax(-1)
            found[split, env] = float((answers == data.labels[numbers]).double().mean())
    return found


def validation(model: nn.Module) -> float:
    return float(accuracies(model)[1, [0, 2]].mean())  # environment 1 is held out


def greedy_by_hand(folder: Path, average: str | None) -> list[nn.Module]:
    some = modules(folder, average)
    ordered = [module for _, module in sorted(some, key=lambda one: (-validation(one[1]), -one[0].hparams_seed))]
    chosen = [ordered[0]]
    for module in ordered[1:]:
        if validation(soup_of([*chosen, module], folder)) >= validation(soup_of(chosen, folder)):
            chosen.append(module)
    return chosen


def record_of(made: pd.DataFrame, kind: str, average: str | None) -> RunRecord:
    (row,) = made[
        (made["soup"] == kind) & (made["average"].isna() if average is None else made["average"] == average)
    ].to_dict("records")
    return RunFolder(Path(row["folder"])).record()


@pytest.mark.parametrize("average", [None, "sma"])
@pytest.mark.parametrize("kind", ["uniform", "greedy", "ensemble"])
def test_a_soup_is_the_mean_that_one_takes_by_hand(
    folder: Path, made: pd.DataFrame, kind: str, average: str | None
) -> None:
    some = greedy_by_hand(folder, average) if kind == "greedy" else [one for _, one in modules(folder, average)]
    expected = accuracies(Ensemble(some) if kind == "ensemble" else soup_of(some, folder))
    record = record_of(made, kind, average)
    np.testing.assert_allclose(record.accuracy_in[0], expected[0], rtol=0, atol=1e-9)
    np.testing.assert_allclose(record.accuracy_out[0], expected[1], rtol=0, atol=1e-9)
    assert record.sizes == read_runs(folder)[0].sizes
    assert record.spec.hparams["members"] == len(some)
    assert measured(record, "f1", "in") is not None
    if kind != "ensemble":  # which is no single model
        trained = load_run(next(row for row in made["folder"] if RunFolder(Path(row)).record().spec == record.spec))
        np.testing.assert_allclose(accuracies(trained.module())[0], expected[0], rtol=0, atol=1e-9)


def test_the_greedy_soup_leaves_out_what_does_not_help(made: pd.DataFrame) -> None:
    greedy = made[made["soup"] == "greedy"]
    assert (greedy["candidates"] == 4).all()
    assert (greedy["members"] < 4).any(), "too easy: every member helps"
    uniform = made[made["soup"] == "uniform"]
    assert (greedy["validation"].to_numpy() >= uniform["validation"].to_numpy()).all()


def test_reports_show_soups_as_methods_of_their_own(folder: Path, made: pd.DataFrame) -> None:
    runs = read_runs(folder)
    assert len([run for run in runs if "soup" in run.spec.options]) == len(made) == 6
    report = build_report(runs, ["training-domain", "oracle"])
    table = report.rules[0].datasets["DebugVector"]
    protocol = ("ERM", "ERM + SMA")
    assert table.methods[:2] == protocol
    assert set(table.methods[2:]) == {
        f"{name} + {kind}" for name in protocol for kind in ("uniform soup", "greedy soup", "ensemble")
    }
    assert (table.cells["ERM", "b"].have, table.cells["ERM", "b"].expected) == (4, 4)
    assert all(table.cells[method, "b"].complete for method in table.methods)
    without = build_report([run for run in runs if "soup" not in run.spec.options])
    for method in protocol:
        assert table.cells[method, "b"].mean == without.rules[0].datasets["DebugVector"].cells[method, "b"].mean
    statistics = report.rules[0].statistics
    assert statistics is not None
    assert [one.method for one in statistics.comparisons if one.mean_rank is not None] == list(protocol)
    assert "ERM + greedy soup" in str(report)


def test_an_ensemble_cannot_be_loaded(folder: Path, made: pd.DataFrame) -> None:
    assert "ensemble" in set(made["soup"])
    with pytest.raises(SandmaskError, match="an ensemble, which has no model file, only a record"):
        load_run(folder / "soups" / "DebugVector-ERM-ensemble-env1-trial0")


def test_a_soup_is_made_again_in_its_place(folder: Path, made: pd.DataFrame) -> None:
    before = {Path(place): (Path(place) / "records.jsonl").read_bytes() for place in made["folder"]}
    done = CliRunner().invoke(
        app, ["soup", str(folder), "--device", "cpu", "--kind", "uniform", "--of", "sma", "--json"]
    )
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    assert (row["soup"], row["average"], row["members"]) == ("uniform", "sma", 4)
    assert {place: (place / "records.jsonl").read_bytes() for place in before} == before


def test_without_a_shared_start_there_are_ensembles_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {**ASKED, "shared_init": False, "n_hparams": 2, "averages": None, "keep_models": "last", "metrics": None}
    sandmask.sweep(tmp_path, **asked, **HERE)
    with pytest.raises(SandmaskError, match="No uniform soup of ERM on DebugVector is possible: its runs start from"):
        sandmask.soup(tmp_path, "uniform", device="cpu")
    assert sandmask.soup(tmp_path, device="cpu")["soup"].tolist() == ["ensemble"]
    assert "train the sweep with --shared-init" in capsys.readouterr().err
    assert len(list(split_averages(read_runs(tmp_path)))) == 3
    sandmask.sweep(tmp_path, n_hparams=3, **HERE)
    note = f"the soups do not include the new runs. Make them again: sandmask soup {tmp_path} --kind ensemble\n"
    assert note in capsys.readouterr().err


def test_what_cannot_be_combined_is_said_in_a_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match="holds no sweep"):
        sandmask.soup(tmp_path)
    with pytest.raises(SandmaskError, match=r"Unknown kind of soup 'gready'\. Did you mean 'greedy'"):
        sandmask.soup(folder, "gready")
    with pytest.raises(SandmaskError, match="Unknown average 'weight'"):
        sandmask.soup(folder, of="weight")
    with pytest.raises(SandmaskError, match=r"The sweep kept no ema\. Choose from: weights, sma"):
        sandmask.soup(folder, of="ema")
    write_sweep(SweepSpec(("DebugVector",), ("ERM",)), tmp_path / "sweep.toml")
    with pytest.raises(SandmaskError, match="holds no models to combine"):
        sandmask.soup(tmp_path)


def test_models_of_files_that_have_changed_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {**ASKED, "datasets": tmp_path / "data.npz", "averages": None, "n_hparams": 1, "test_envs": ["b"]}
    for seed in range(2):
        rng = np.random.default_rng(seed)
        arrays: dict[str, Any] = {"inputs": rng.normal(size=(60, 4)).astype("f4"), "class": rng.integers(0, 2, 60)}
        np.savez(tmp_path / "data.npz", domain=np.repeat(["a", "b", "c"], 20), **arrays)
        if seed:
            with pytest.raises(SandmaskError, match=r"No soup of data-\w+ is possible: its files have changed since"):
                sandmask.soup(tmp_path / "sweep", device="cpu")
        sandmask.sweep(tmp_path / "sweep", **asked, **HERE)
        assert len(sandmask.soup(tmp_path / "sweep", "ensemble", device="cpu")) == 1
    assert "No soup of data-" in capsys.readouterr().err


def test_runs_are_not_judged_by_the_examples_that_they_trained_on(tmp_path: Path) -> None:
    full = SweepSpec(("DebugVector",), ("ERM",), hparams={"full_data": 1})
    write_sweep(full, tmp_path / "sweep.toml")
    with pytest.raises(SandmaskError, match="have full_data=1 and trained on the validation examples"):
        sandmask.soup(tmp_path)
    with pytest.raises(SandmaskError, match="runs with full_data=1 have none"):
        expand(replace(full, search="optuna"))
    with pytest.raises(SandmaskError, match="Use --keep-models last"):
        sandmask.sweep(tmp_path / "new", "DebugVector", "ERM", keep_models="best", hparams={"full_data": 1})


def test_progress_says_how_many_results_are_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sandmask.api._progress.LINE_SECONDS", 0.0)
    sandmask.soup(folder, "ensemble", device="cpu", progress="lines")
    assert capsys.readouterr().err.splitlines() == ["0/2 results", "1/2 results"]
    sandmask.soup(folder, "ensemble", device="cpu")
    assert capsys.readouterr().err == ""
