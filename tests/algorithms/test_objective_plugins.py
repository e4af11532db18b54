"""Mistakes in objectives of one's own are named before they go on as wrong numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sandmask.algorithms import ALGORITHMS, AlgorithmEntry, Hparams, ObjectiveAlgorithm, State, environment_risks
from sandmask.datasets import DATASETS, load_dataset
from sandmask.errors import SandmaskError
from sandmask.functional import EnvBatch, Params
from sandmask.training import make_spec, train_stack


class NoNumber(ObjectiveAlgorithm):
    """Forgets to take the mean over environments."""

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        return environment_risks(self.logits(params, batch, hparams), batch), {}


class NoSuchState(ObjectiveAlgorithm):
    """Keeps an average that it never began."""

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        risk = environment_risks(self.logits(params, batch, hparams), batch).mean()
        return risk, {"average": risk.detach()}


class NoState(ObjectiveAlgorithm):
    """Returns the value alone."""

    def objective(self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> Any:
        return environment_risks(self.logits(params, batch, hparams), batch).mean()


@pytest.mark.parametrize("n_runs", [1, 2])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoNumber, "should return one number"),
        (NoSuchState, "Create them in `extra_state`"),
        (NoState, "it may be empty\\). Found Tensor"),
    ],
)
def test_mistakes_are_named(
    kind: Any, message: str, n_runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ALGORITHMS, "_entries", dict(ALGORITHMS._entries))
    ALGORITHMS.register(AlgorithmEntry(kind.__name__, "a test", "a test", kind))
    data, entry = load_dataset("DebugVector"), DATASETS["DebugVector"]
    specs = [make_spec(entry, kind.__name__, test_envs=[0], steps=2, seed=seed) for seed in range(n_runs)]
    with pytest.raises(SandmaskError, match=message):
        train_stack(specs, data, torch.device("cpu"), tmp_path / "stack.safetensors")
