"""The tidy frame, against a loop over everything."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from sandmask.records import frame, load_records, write_archive
from sandmask.records.testing import made_up_run, made_up_sweep


def test_the_frame_has_a_row_for_each_run_step_and_environment(tmp_path: Path) -> None:
    runs = made_up_sweep(["ERM", "IRM"], pairs=True, draws=2, trials=1)
    runs.append(made_up_run([[0.25, 0.5]], dataset="Two", env_names=["left", "right"], hparams={"tau": 0.5}))
    runs.append(replace(made_up_run([[0.5, 0.5]], seed=9), metrics={"penalty": np.array([3.0])}))
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
    assert words == ["run", "dataset", "algorithm", "test_envs", "space", "env_name", "status"]
    plain = read.astype(dict.fromkeys(words, "object"))
    twin = pd.DataFrame(expected).astype(dict.fromkeys(words, "object"))
    pd.testing.assert_frame_equal(plain, twin[list(plain.columns)])


def test_no_runs_give_an_empty_frame_with_its_columns(tmp_path: Path) -> None:
    empty = load_records(tmp_path)
    assert len(empty) == 0
    assert {"run", "dataset", "step", "env", "in_accuracy", "out_accuracy", "status"} <= set(empty.columns)


def test_hyperparameters_can_be_left_out() -> None:
    runs = [made_up_run([[0.5, 0.5]])]
    assert "hparams.lr" in frame(runs)
    assert "hparams.lr" not in frame(runs, hparams=False)
