"""What `--tensorboard` writes, read back with TensorBoard's own reader."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from sandmask.datasets import Dataset
from sandmask.loggers import log_record
from sandmask.records import RunRecord, RunSpec
from sandmask.training import Progress, RunFolder

Specs = Callable[..., RunSpec]
Interrupts = Callable[[int], Callable[[Progress], None]]


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {name: [(p.step, p.value) for p in events.Scalars(name)] for name in events.Tags()["scalars"]}


def expected(record: RunRecord) -> dict[str, list[tuple[int, float]]]:
    curves = dict(record.metrics)
    for e, name in enumerate(record.env_names):
        curves[f"accuracy/in/{name}"] = record.accuracy_in[:, e]
        curves[f"accuracy/out/{name}"] = record.accuracy_out[:, e]
    curves["accuracy/out/training environments"] = record.accuracy_out[:, record.train_envs].mean(1)
    steps = record.steps.tolist()
    points = {name: curve.astype(np.float32).tolist() for name, curve in curves.items()}
    return {name: list(zip(steps, values, strict=True)) for name, values in points.items()}


@pytest.fixture
def spec(spec_of: Specs) -> RunSpec:
    return spec_of("ANDMask", hparams={"tau": 0.5})


def test_a_run_is_written_as_it_trains(spec: RunSpec, dataset: Dataset, device: torch.device, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    record = folder.train(spec, dataset, device, diagnostics=True, loggers=[f"tensorboard:{tmp_path / 'board'}"])
    assert "agreement/all/9" in record.metrics
    assert read(tmp_path / "board") == expected(record)


def test_a_run_that_was_stopped_is_shown_once(
    spec: RunSpec, dataset: Dataset, device: torch.device, tmp_path: Path, interrupt_at: Interrupts
) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        folder.train(spec, dataset, device, loggers=[f"tensorboard:{tmp_path / 'board'}"], on_progress=interrupt_at(8))
    assert len(read(tmp_path / "board")["loss"]) == 2
    record = folder.train(spec, dataset, device, loggers=[f"tensorboard:{tmp_path / 'board'}"])
    assert read(tmp_path / "board") == expected(record)


def test_a_finished_record_can_be_written_too(
    spec: RunSpec, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    record = RunFolder(tmp_path / "run").train(spec, dataset, device)
    log_record(record, [f"tensorboard:{tmp_path / 'board'}"])
    assert read(tmp_path / "board" / spec.folder_name) == expected(record)
