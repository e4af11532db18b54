from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sandmask.algorithms import ERM, Hparams, Metrics, State
from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.functional import EnvBatch
from sandmask.records import RunSpec
from sandmask.training import RunFolder


def test_a_full_device_is_an_error_that_loses_nothing(
    tmp_path: Path,
    dataset: Dataset,
    spec_of: Callable[..., RunSpec],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_of()
    whole = RunFolder(tmp_path / "whole").train(spec, dataset, device)
    step, calls = ERM.step, []

    def fails_once(
        self: ERM, state: State, batch: EnvBatch, hparams: Hparams, key: torch.Tensor
    ) -> tuple[State, Metrics]:
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, state, batch, hparams, key)

    monkeypatch.setattr(ERM, "step", fails_once)
    folder = RunFolder(tmp_path / "parts")
    with pytest.raises(SandmaskError, match="ran out of memory"):
        folder.train(spec, dataset, device)
    resumed = folder.train(spec, dataset, device)
    assert len(calls) == 4 + 9  # 12 steps in all, of which 3 were kept
    assert resumed.accuracy_in.tolist() == whole.accuracy_in.tolist()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_model_too_large_to_begin_with_is_told_and_leaves_nothing(
    tmp_path: Path,
    dataset: Dataset,
    spec_of: Callable[..., RunSpec],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    error: RuntimeError,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("sandmask.training.folder.Stack", full)
    with pytest.raises(SandmaskError, match="ran out of memory"):
        RunFolder(tmp_path / "run").train(spec_of(), dataset, device)
    assert list(tmp_path.iterdir()) == []
