"""Arguments of the public functions: what they take, and one line for what they do not."""

import inspect
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sandmask
from sandmask._arguments import CHECKS, checked, names_in
from sandmask.records import write_archive
from sandmask.records.testing import made_up_sweep


@checked
def echo(**given: Any) -> dict[str, Any]:
    return given


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({"steps": np.int64(3)}, 3),
        ({"steps": torch.tensor(3)}, 3),
        ({"seed": None}, None),
        ({"checkpoint_seconds": np.float32(0.5)}, 0.5),
        ({"test_envs": np.int64(1)}, [1]),
        ({"test_envs": np.array([0, 1])}, [0, 1]),
        ({"test_env": np.array(2)}, [2]),
        ({"datasets": (name for name in ("a", Path("b")))}, ["a", "b"]),
        ({"averages": "sma"}, ["sma"]),
        ({"slurm": "partition=gpu"}, ["partition=gpu"]),
        ({"plugins": Path("a.py")}, [Path("a.py")]),
        ({"device": torch.device("cpu")}, "cpu"),
        ({"compiled": np.bool_(True)}, True),
        ({"fast": 0}, False),
        ({"unknown": 1.5}, 1.5),
    ],
)
def test_values_become_what_records_can_hold(given: dict[str, Any], used: object) -> None:
    (found,) = echo(**given).values()
    assert found == used
    assert type(found) is type(used)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": "3"}, "steps should be a whole number. Found '3'."),
        ({"steps": 1.5}, "steps should be a whole number. Found 1.5."),
        ({"n_trials": True}, "n_trials should be a whole number. Found True."),
        ({"train_eval_limit": 2.5}, "train_eval_limit should be a whole number. Found 2.5."),
        ({"diagnostics": "no"}, "diagnostics should be True or False. Found 'no'."),
        ({"shared_init": np.zeros(2)}, "shared_init should be True or False. Found array([0., 0.])."),
        ({"slurm": 5}, "slurm should be NAME=VALUE, several of these, or a mapping. Found 5."),
        ({"keep_models": 5}, "keep_models should be a text. Found 5."),
        ({"first_stage": 5}, "first_stage should be a path. Found 5."),
        ({"checkpoint_seconds": float("nan")}, "checkpoint_seconds should be a number, 0 or more. Found nan."),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds should be a number, 0 or more. Found -1."),
        ({"algorithm": ["ERM"]}, "algorithm should be a text. Found ['ERM']."),
        ({"out": 3}, "out should be a path. Found 3."),
        ({"out": "a\0b"}, "out should be a path. Found 'a\\x00b'."),
        ({"dataset": b"Spirals"}, "dataset should be a name or a path. Found b'Spirals'."),
        ({"files": np.zeros(2)}, "files should be a path or several. Found array([0., 0.])."),
        ({"test_env": 1.0}, "test_env should be a name or number, or several. Found 1.0."),
        ({"selection": [None]}, "selection should be a name or number, or several. Found [None]."),
        ({"hparams": [("lr", 1)]}, "hparams should be a mapping from names to values. Found [('lr', 1)]."),
        ({"hparams": {3: 1}}, "hparams should be a mapping from names to values. Found {3: 1}."),
        ({"run": 3}, "run should be a folder, a model file or a trained run. Found 3."),
    ],
)
def test_wrong_types_are_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(sandmask.SandmaskError) as caught:
        echo(**given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "call",
    [
        lambda: sandmask.train("DebugVector", "ERM", None),  # type: ignore[arg-type]
        lambda: sandmask.sweep(None),  # type: ignore[arg-type]
        lambda: sandmask.plan_sweep("x", datasets="DebugVector", algorithms="ERM", n_hparams=1.5),  # type: ignore[arg-type]
        lambda: sandmask.plan_sweep("x", datasets="DebugVector", algorithms="ERM", max_stack=0, calibrate=False),
        lambda: sandmask.report([]),
        lambda: sandmask.report("x", draws=0),
        lambda: sandmask.report("x", trials=10**12),
        lambda: sandmask.predict("x", None),  # type: ignore[arg-type]
        lambda: sandmask.train("x" * 5000, "ERM", 0),
        lambda: sandmask.train("DebugVector", "ERM", 0, hparams_seed=2**64),
        lambda: sandmask.train("DebugVector", "ERM", 0, log=5),  # type: ignore[arg-type]
        lambda: sandmask.soup(3),  # type: ignore[arg-type]
    ],
)
def test_every_function_checks_its_arguments(call: Callable[[], object]) -> None:
    with pytest.raises(sandmask.SandmaskError, match=r"should be|needs at least|Unknown dataset"):
        call()


@pytest.mark.parametrize(
    "function", [sandmask.train, sandmask.sweep, sandmask.plan_sweep, sandmask.soup, sandmask.report, sandmask.predict]
)
def test_every_argument_is_checked(function: Callable[..., object]) -> None:
    checked_elsewhere = {"log", "progress", "request"}
    assert set(inspect.signature(function).parameters) <= CHECKS.keys() | checked_elsewhere


def test_names_may_be_numbers(tmp_path: Path) -> None:
    write_archive(made_up_sweep(["ERM"]), tmp_path / "sweep.records.parquet")
    with pytest.raises(sandmask.SandmaskError, match="Unknown selection rule '3'"):
        sandmask.report(tmp_path, 3)


def test_a_missing_or_unknown_argument_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        sandmask.train("DebugVector", "ERM", 0, step=3)  # type: ignore[call-arg]


def test_names_may_be_members_of_an_enum() -> None:
    class Rule(str, Enum):  # noqa: UP042 - `str` of its members is not their value
        IID = "iid,oracle"

    assert names_in(Rule.IID) == names_in([Rule.IID]) == ("iid", "oracle")
