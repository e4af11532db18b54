import math

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from torch import Tensor

from sandmask.datasets import load_dataset
from sandmask.datasets.spirals import spiral_environment
from sandmask.errors import SandmaskError


def naive_environment(e: int) -> tuple[list[list[float]], list[int]]:
    """PROTOCOL's draws one example at a time, in plain Python."""
    n = 2000 if e == 0 else 1024
    draws = RandomState(2**32 - 1 if e == 0 else e - 1)
    signatures = [[draws.normal() for _ in range(16)] for _ in range(16)]
    radii = [draws.uniform(0.08, 1) for _ in range(n)]
    labels = [int(label) for label in draws.randint(0, 2, n)]
    noisy = [radius + draws.uniform(-0.02, 0.02) for radius in radii]
    rows = []
    for radius, label, length in zip(radii, labels, noisy, strict=True):
        angle = 2 * math.pi * 3 * radius + math.pi * label
        rows.append([math.cos(angle) * length, math.sin(angle) * length])
    for axis in (0, 1):
        values = [row[axis] for row in rows]
        mean = sum(values) / n
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / n)
        for row in rows:
            row[axis] /= deviation
    for row, label in zip(rows, labels, strict=True):
        if e == 0:
            row += [draws.normal() for _ in range(16)]
        else:
            row += [value * (1 if label else -1) for value in signatures[e - 1]]
    return rows, labels


@pytest.mark.parametrize("e", [0, 1, 7, 16])
def test_environment_equals_the_naive_twin(e: int) -> None:
    inputs, labels = spiral_environment(e)
    rows, expected = naive_environment(e)
    torch.testing.assert_close(inputs, torch.tensor(rows), rtol=1e-5, atol=1e-6)
    assert labels.tolist() == expected


def test_sizes_and_determinism() -> None:
    first, second = load_dataset("Spirals"), load_dataset("spirals")
    assert first.bounds == (0, *range(2000, 2000 + 17 * 1024, 1024))
    assert len(first.environments) == 17
    everything = torch.arange(first.bounds[-1])
    assert torch.equal(first.inputs(everything), second.inputs(everything))
    assert torch.equal(first.labels, second.labels)


def spiral_oracle(inputs: Tensor) -> Tensor:
    """The label whose spiral arm is nearer in angle at this radius; one scale, the expected one, for all."""
    x, y = 0.4257 * inputs[:, 0], 0.4257 * inputs[:, 1]
    off = torch.atan2(y, x) - 6 * math.pi * torch.hypot(x, y)
    return (torch.cos(off) < 0).long()


@pytest.mark.parametrize("e", range(17))
def test_the_spiral_carries_the_label_everywhere(e: int) -> None:
    inputs, labels = spiral_environment(e)
    assert (spiral_oracle(inputs) == labels).float().mean() > 0.99


@pytest.mark.parametrize("e", range(17))
def test_the_signature_carries_the_label_except_in_environment_0(e: int) -> None:
    inputs, labels = spiral_environment(e)
    sign = (2 * labels - 1).float()
    half = len(labels) // 2
    direction = (inputs[:half, 2:] * sign[:half, None]).mean(0)
    accuracy = (((inputs[half:, 2:] @ direction) > 0) == labels[half:].bool()).float().mean()
    assert accuracy < 0.6 if e == 0 else accuracy == 1.0


def test_signatures_of_environments_contradict_each_other() -> None:
    directions = [spiral_environment(e) for e in range(1, 17)]
    means = torch.stack([(x[:, 2:] * (2 * y - 1)[:, None]).mean(0) for x, y in directions])
    cosines = torch.nn.functional.cosine_similarity(means[:, None], means[None], dim=-1)
    assert cosines[~torch.eye(16, dtype=torch.bool)].abs().max() < 0.9


def test_noise_touches_the_mechanism_alone() -> None:
    clean, labels = spiral_environment(3)
    noisy, noisy_labels = spiral_environment(3, noise=0.5)
    assert torch.equal(labels, noisy_labels)
    assert torch.equal(clean[:, 2:], noisy[:, 2:])
    change = (noisy - clean)[:, :2].numpy()
    assert np.std(change) == pytest.approx(0.5, rel=0.1)
    torch.testing.assert_close(load_dataset("Spirals", noise=0.5).inputs(torch.arange(4048, 5072)), noisy)


def test_negative_noise_is_refused() -> None:
    with pytest.raises(SandmaskError, match="noise"):
        load_dataset("Spirals", noise=-1.0)
