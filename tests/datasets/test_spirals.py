import math

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from torch import Tensor

from sandmask.datasets import dataset_entry, load_dataset
from sandmask.datasets.spirals import PUBLISHED, SpiralParameters, spiral_environment
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


def test_parameters_follow_the_name() -> None:
    entry = dataset_entry("Spirals:signature=4:seed=3:environments=5:examples=40:revolutions=1")
    assert entry.name == "Spirals:seed=3:environments=5:signature=4:examples=40:revolutions=1"
    data = load_dataset(entry.name)
    assert (data.name, data.environments, data.input_shape) == (entry.name, ("0", "1", "2", "3", "4", "5"), (6,))
    assert np.diff(data.bounds).tolist() == [80, 40, 40, 40, 40, 40]
    assert entry.report_envs == (0, 1, 2, 3, 4)


def test_default_parameters_are_the_published_data() -> None:
    assert dataset_entry("Spirals:seed=0:examples=1024") is dataset_entry("Spirals")
    assert PUBLISHED.name == "Spirals"


def test_another_seed_is_other_data_of_the_same_kind() -> None:
    for e in (0, 1, 2):
        (inputs, labels), (published, _) = (
            spiral_environment(e, parameters=SpiralParameters(seed=1)),
            spiral_environment(e),
        )
        assert inputs.shape == published.shape
        assert not torch.equal(inputs, published)
        signs = (2 * labels - 1)[:, None]
        signature = inputs[:, 2:] * signs
        assert torch.equal(signature, signature[:1].expand_as(signature)) == (e != 0)
    other = spiral_environment(1, parameters=SpiralParameters(seed=2))[0]
    assert not torch.equal(other, spiral_environment(1, parameters=SpiralParameters(seed=1))[0])


def test_radii_carry_the_label_with_other_revolutions() -> None:
    inputs, labels = spiral_environment(2, parameters=SpiralParameters(revolutions=1))
    published, same_labels = spiral_environment(2)
    assert torch.equal(labels, same_labels)
    assert not torch.allclose(inputs[:, :2], published[:, :2])
    assert torch.equal(inputs[:, 2:], published[:, 2:])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Spirals:sed=1", "Spirals has no parameter 'sed'. Did you mean 'seed'"),
        ("Spirals:seed=x", "parameter 'seed' should be a whole number from 0 to a million. Found 'x'"),
        ("Spirals:environments=1", "parameter 'environments' should be a whole number from 2"),
        ("Spirals:seed", "should be name=value, each once"),
        ("Spirals:seed=1:seed=2", "should be name=value, each once"),
        ("PACS:seed=1", "PACS has no parameters"),
    ],
)
def test_wrong_parameters_are_named(name: str, message: str) -> None:
    with pytest.raises(SandmaskError, match=message):
        dataset_entry(name)
