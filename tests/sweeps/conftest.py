"""Sweeps that take a moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandmask.sweeps import SweepFolder, SweepSpec, normalized

SMALL = {"mlp_width": 8, "batch_size": 8}


def small(**changes: Any) -> SweepSpec:
    """Two draws of two methods on generated vectors."""
    fields: dict[str, Any] = {
        "datasets": ("DebugVector",),
        "algorithms": ("ERM", "SANDMask"),
        "n_hparams": 2,
        "n_trials": 1,
        "steps": 7,
        "checkpoint_every": 3,
        "hparams": {**SMALL, "tau": 0.3},
    }
    return normalized(SweepSpec(**{**fields, **changes}))


@pytest.fixture(scope="session")
def small_sweep() -> Callable[..., SweepSpec]:
    return small


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    return SweepFolder(tmp_path / "sweep")
