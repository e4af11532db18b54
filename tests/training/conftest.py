from collections.abc import Callable

import pytest
import torch

from sandmask.datasets import DATASETS, Dataset, load_dataset
from sandmask.records import RunSpec
from sandmask.training import Progress, make_spec

SMALL = {"batch_size": 8, "mlp_width": 16, "lr": 1e-2}


@pytest.fixture
def dataset() -> Dataset:
    return load_dataset("DebugVector")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def spec_of() -> Callable[..., RunSpec]:
    def make(algorithm: str = "ERM", test_envs: tuple[int, ...] = (0,), **options: object) -> RunSpec:
        hparams = {**SMALL, **options.pop("hparams", {})}  # type: ignore[dict-item]
        settings = {"steps": 12, "checkpoint_every": 5, "space": "paper", **options}
        return make_spec(DATASETS["DebugVector"], algorithm, test_envs, hparams=hparams, **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture
def interrupt_at() -> Callable[[int], Callable[[Progress], None]]:
    """What to do on progress: interrupt the training after this step."""

    def at(step: int) -> Callable[[Progress], None]:
        def interrupt(progress: Progress) -> None:
            if progress.done == step:
                raise KeyboardInterrupt

        return interrupt

    return at
