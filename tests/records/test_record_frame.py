"""The tidy frame, against a loop over everything."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sandmask.errors import SandmaskError
from sandmask.records import frame, load_records, write_archive
from sandmask.records.testing import made_up_run, made_up_sweep


def test_the_frame_has_a_row_for_each_run_step_and_environment(tmp_path: Path) -> None:
    runs = made_up_sweep(["ERM", "IRM"], pairs=True, draws=2, trials=1)
    runs.append(made_up_run([[0.25, 0.5]], dataset="Two", env_names=["left", "right"], hparams={"tau": 0.5}))
    runs.append(replace(made_up_run([[0.5, 0.5]], seed=9), metrics={"penalty": np.array([3.0])}))
    runs[0] = replace(runs[0], spec=replace(runs[0].spec, network="resnet18", weights="a.pth", precision="bf16"))
    write_archive(runs, tmp_path / "x.records.parquet")
    expected = [
        {
            "run": run.spec.id,
            "dataset": run.spec.dataset,
            "algorithm": run.spec.algorithm,
            "test_envs": ",".join(str(env) for env in run.spec.test_envs),
            "trial_seed": run.spec.trial_seed,
            "hparams_seed": run.spec.hparams_seed,
            "seed": run.spec.seed,
            "space": run.spec.space,
            "network": run.spec.network,
            "weights": run.spec.weights,
            "precision": run.spec.precision,
            "options": "",
            "step": step,
            "env": env,
            "env_name": name,
            "is_test": env in run.spec.test_envs,
            "in_accuracy": run.accuracy_in[row, env],
            "out_accuracy": run.accuracy_out[row, env],
            "status": run.status,
            "loss": run.metrics["loss"][row] if "loss" in run.metrics else np.nan,
            "penalty": run.metrics["penalty"][row] if "penalty" in run.metrics else np.nan,
            "hparams.lr": run.spec.hparams.get("lr", np.nan),
            "hparams.tau": run.spec.hparams.get("tau", np.nan),
        }
        for run in runs
        for row, step in enumerate(run.steps)
        for env, name in enumerate(run.env_names)
    ]
    read = load_records(tmp_path)
    words = [name for name, kind in read.dtypes.items() if isinstance(kind, pd.CategoricalDtype)]
    settings = ["space", "network", "weights", "precision", "options"]
    assert words == ["run", "dataset", "algorithm", "test_envs", *settings, "env_name", "status"]
    assert isinstance(read["hparams.tau"].dtype, pd.SparseDtype)  # most rows have none
    plain = read.astype({**dict.fromkeys(words, "object"), "hparams.tau": "float64"})
    twin = pd.DataFrame(expected).astype(dict.fromkeys(words, "object"))
    pd.testing.assert_frame_equal(plain, twin[list(plain.columns)], check_dtype=False)
    assert all(read[name].dtype == "int32" for name in ("step", "env", "trial_seed", "hparams_seed"))


def test_no_runs_give_an_empty_frame_with_its_columns(tmp_path: Path) -> None:
    empty = load_records(tmp_path)
    assert len(empty) == 0
    assert {"run", "dataset", "step", "env", "in_accuracy", "out_accuracy", "status"} <= set(empty.columns)


def test_hyperparameters_can_be_left_out() -> None:
    runs = [made_up_run([[0.5, 0.5]])]
    assert "hparams.lr" in frame(runs)
    assert "hparams.lr" not in frame(runs, hparams=False)


def test_runs_alike_but_for_their_options_are_told_apart() -> None:
    run = made_up_run([[0.5, 0.5]])
    averaged = replace(run, spec=replace(run.spec, options={"average": "sma", "window": 3}))
    options = frame([run, averaged])["options"]
    assert options.tolist() == ["", "", "average=sma, window=3", "average=sma, window=3"]


def test_hyperparameters_may_be_anything_that_json_has() -> None:
    some: list[dict[str, Any]] = [{"flag": True, "word": "a"}, {"word": None, "list": [1, 2]}, {"large": 2**40}, {}]
    runs = [made_up_run([[0.5]], hparams=hparams, seed=seed, test_envs=[]) for seed, hparams in enumerate(some)]
    found = frame(runs)
    assert found["hparams.word"].dropna().tolist() == ["a"]
    assert found["hparams.list"].dropna().tolist() == ["[1, 2]"]
    assert found["hparams.large"].dropna().tolist() == [2**40]
    assert found["hparams.flag"].dropna().tolist() == [1]


def test_several_files_are_gathered_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = made_up_sweep(["ERM"], draws=3)
    runs[1].metrics["late"] = np.arange(5.0)
    whole = frame(runs)
    monkeypatch.setattr("sandmask.records._frame._CHUNK", 11)
    pd.testing.assert_frame_equal(frame(runs), whole)
    write_archive(runs[:4], tmp_path / "a.records.parquet")
    write_archive(runs[4:], tmp_path / "b.records.parquet")
    assert len(load_records(tmp_path)) == len(whole)
    write_archive(runs[2:6], tmp_path / "c.records.parquet")  # runs that two files have count once
    assert len(load_records(tmp_path)) == len(whole)


def test_a_frame_takes_no_more_memory_than_its_columns() -> None:
    runs = made_up_sweep(["ERM", "IRM"], environments=10, checkpoints=200, draws=5)
    tracemalloc.start()
    found = frame(runs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 10 * 2 * 5 * 2 * 10 * 200
    assert peak < 1.6 * found.memory_usage().sum()


def test_the_longer_of_two_records_of_a_run_is_taken_and_contradictions_are_named(tmp_path: Path) -> None:
    run = made_up_run([[0.5, 0.5], [0.6, 0.6]])
    short = replace(run.at(slice(1)), metrics={}, status="running")
    write_archive([short], tmp_path / "a.records.parquet")
    write_archive([run], tmp_path / "b.records.parquet")
    assert len(load_records(tmp_path)) == 4
    write_archive([replace(run, accuracy_in=1 - run.accuracy_in)], tmp_path / "c.records.parquet")
    with pytest.raises(SandmaskError, match="was trained twice with different results"):
        load_records(tmp_path)
