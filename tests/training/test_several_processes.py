"""One run in several processes gives what it gives in one, to rounding."""

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import start_processes

import sandmask
from sandmask.algorithms import State
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord
from sandmask.training import RunFolder
from sandmask.training.checkpoint import load_checked
from sandmask.training.processes import check_equal, process_group

SMALL: dict[str, Any] = {"mlp_width": 16, "batch_size": 10}
ARGUMENTS: dict[str, Any] = {"steps": 7, "checkpoint_every": 3, "space": "paper", "device": "cpu", "progress": False}
REFUSED = {
    "other seed": "Process 1 trains another run than process 0: they differ in seed.",
    "no such environment": "has no environment 'nowhere'",
    "not divided": "IGA takes gradients inside its objective, so it cannot be divided over processes.",
    "different bits": "The processes of this run have different parameters after step 3.",
    "compiled": "--compile works in one process only.",
    "sweep": "A sweep starts its own workers.",
}
# 15 environments over 2 or 4 processes: whole ones and shared ones. DebugVector has 2 to train on, fewer than 4.
LONGER = "SANDMask"  # begun in one process, and then given more steps in several
CASES: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "ERM": ("Spirals", [5, 6], {"averages": "sma,ema,swad", "metrics": "all", "hparams": {"dropout": 0.1}}),
    "ANDMask": ("Spirals", [5, 6], {"hparams": {"tau": 0.5}}),
    "SANDMask": ("Spirals", [5, 6], {"hparams": {"tau": 0.2}, "diagnostics": True, "averages": "sma"}),
    "GeometricMean": ("DebugVector", [0], {"hparams": {"tau": 0.5}}),
    "SANDMask+VREx": ("DebugVector", [0], {"hparams": {"tau": 0.2, "lr_patience": 1}}),
    "MTL": ("DebugVector", [0], {"metrics": "f1"}),  # evaluated in batches of one environment
}


def train(name: str, folder: Path, **more: Any) -> RunRecord:
    dataset, test_envs, options = CASES[name]
    hparams = {**SMALL, **options.get("hparams", {})}
    given = {**ARGUMENTS, **options, "hparams": hparams, **more}
    return sandmask.train(dataset, name, test_envs, out=folder / name, **given).record


def cases_of(world: int) -> list[str]:
    return list(CASES) if world == 2 else list(CASES)[:4]


def message(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(SandmaskError) as caught:
        call(*args, **options)
    return str(caught.value)


def compare(state: State) -> None:
    with process_group("cpu") as ranks:
        check_equal(ranks, state)


def messages(rank: int, folder: Path) -> dict[str, str]:
    """What is refused, in the same words in every process or in words about the other one."""
    return {
        "other seed": message(train, "ERM", folder / "refused", seed=rank),
        "no such environment": message(
            sandmask.train, "DebugVector", "ERM", "nowhere" if rank == 1 else 0, **ARGUMENTS, out=folder / "refused"
        ),
        "not divided": message(sandmask.train, "DebugVector", "IGA", 0, **ARGUMENTS, out=folder / "refused"),
        "different bits": message(compare, {"params": torch.tensor([0.5 + rank * 2**-24]), "step": torch.tensor([3])}),
        "compiled": message(train, "ERM", folder / "refused", compiled=True),
        "sweep": message(sandmask.sweep, folder / "refused", datasets="DebugVector", algorithms="ERM"),
    }


def work(rank: int, world: int, port: int, folder: str) -> None:
    """What every process does."""
    torch.set_num_threads(1)
    told = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()})
    results: dict[str, Any] = {"records": {name: train(name, Path(folder)) for name in cases_of(world)}}
    if world == 2:
        results["longer"] = train(LONGER, Path(folder) / "longer", steps=11)
        results["messages"] = messages(rank, Path(folder))
    torch.save(results, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    for name in CASES:
        train(name, folder)
    train(LONGER, folder / "longer", steps=11)
    return folder


def results_of(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(file, weights_only=False) for file in sorted(folder.glob("*.pt"))]


def assert_same_files(one: Path, other: Path) -> None:
    """The same files, and models with the same numbers to rounding."""
    assert sorted(file.name for file in one.iterdir()) == sorted(file.name for file in other.iterdir())
    for file in one.glob("*.safetensors"):
        (_, tensors), (_, others) = load_checked(file), load_checked(other / file.name)
        torch.testing.assert_close(tensors, others, rtol=1e-4, atol=1e-5)


def assert_same_record(one: RunRecord, other: RunRecord) -> None:
    assert (one.spec, one.status, one.env_names, one.sizes) == (other.spec, other.status, other.env_names, other.sizes)
    assert list(one.metrics) == list(other.metrics)
    np.testing.assert_array_equal(one.steps, other.steps)
    for name in one.metrics:
        np.testing.assert_allclose(one.metrics[name], other.metrics[name], rtol=1e-3, atol=1e-4, err_msg=name)
    for name in ("accuracy_in", "accuracy_out"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-12)
    for name in one.tables:
        np.testing.assert_array_equal(one.tables[name], other.tables[name])


@pytest.mark.parametrize("world", [2, 4])  # one test each: what it needs is computed once
def test_several_processes_train_the_runs_of_one(world: int, alone: Path, tmp_path: Path) -> None:
    if world == 2:
        train(LONGER, tmp_path / "longer", steps=5, keep_checkpoint=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(  # type: ignore[no-untyped-call]
        work, args=(world, port, str(tmp_path)), nprocs=world, start_method="forkserver"
    )
    for results in results_of(tmp_path):
        for name, record in results["records"].items():
            assert_same_record(record, RunFolder(alone / name).record())
            assert_same_files(tmp_path / name, alone / name)
        if "longer" in results:
            assert_same_record(results["longer"], RunFolder(alone / "longer" / LONGER).record())
            assert_same_files(tmp_path / "longer" / LONGER, alone / "longer" / LONGER)
        for mistake, said in results.get("messages", {}).items():
            assert REFUSED[mistake] in said
    assert not (tmp_path / "refused").exists()
