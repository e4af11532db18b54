"""The example of a method of one's own lies, as it says, between ERM and the AND-mask."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sandmask.algorithms import ALGORITHMS, State
from sandmask.functional import EnvBatch
from sandmask.plugins import load_plugins

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "my_method.py"

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loaded as `--plugin` does, and gone again after the test."""
    others = {key: entry for key, entry in ALGORITHMS._entries.items() if key != "softand"}
    monkeypatch.setattr(ALGORITHMS, "_entries", others)
    loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("sandmask_plugin")}
    load_plugins([EXAMPLE])
    yield
    for name in [name for name in sys.modules if name.startswith("sandmask_plugin")]:
        del sys.modules[name]
    sys.modules.update(loaded)


@pytest.mark.parametrize(
    ("power", "other", "values"), [(0.0, "ERM", {}), (200.0, "ANDMask", {"tau": 1.0})], ids=["ERM", "ANDMask"]
)
def test_its_ends_are_known_methods(
    power: float,
    other: str,
    values: dict[str, float],
    batches: list[EnvBatch],
    hparams_of: MakeHparams,
    train: Train,
) -> None:
    losses, state = train("SoftAND", batches, hparams_of("SoftAND", power=power))
    expected_losses, expected = train(other, batches, hparams_of(other, **values))
    assert losses == pytest.approx(expected_losses, rel=1e-9)
    torch.testing.assert_close(state["params"], expected["params"], rtol=1e-7, atol=1e-9)


def test_in_between_it_is_neither(batches: list[EnvBatch], hparams_of: MakeHparams, train: Train) -> None:
    ends = [train("SoftAND", batches, hparams_of("SoftAND", power=power))[1] for power in (0.0, 2.0, 200.0)]
    assert len({tuple(end["params"].tolist()) for end in ends}) == 3
