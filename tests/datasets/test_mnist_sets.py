import gzip
import hashlib
import os
import runpy
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor

from sandmask.datasets import DATASETS, DatasetEntry, load_dataset
from sandmask.datasets import mnist as module
from sandmask.datasets.mnist import color, deal, load_digits, parse_idx, rotate
from sandmask.errors import SandmaskError

N_TRAIN, N_TEST = 600, 100


def idx(values: NDArray[np.int64]) -> bytes:
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Small files in MNIST's format, taken for the published ones."""
    draws = RandomState(0)
    files = {}
    for part, n in (("train", N_TRAIN), ("t10k", N_TEST)):
        files[f"{part}-images-idx3-ubyte"] = idx(draws.randint(1, 256, (n, 28, 28)))
        files[f"{part}-labels-idx1-ubyte"] = idx(draws.randint(0, 10, n))
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(module, "CONTENT_MD5", md5)
    return files


@pytest.fixture
def mnist(contents: dict[str, bytes], tmp_path: Path) -> Path:
    (tmp_path / "mnist").mkdir()
    for name, content in contents.items():
        (tmp_path / "mnist" / f"{name}.gz").write_bytes(gzip.compress(content))
    return tmp_path


def test_gzipped_and_raw_files_in_either_folder_are_read_alike(
    mnist: Path, contents: dict[str, bytes], tmp_path: Path
) -> None:
    raw = tmp_path / "other" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in contents.items():
        (raw / name).write_bytes(content)
    for one, other in zip(load_digits(mnist), load_digits(tmp_path / "other"), strict=True):
        assert torch.equal(one, other)
    images, labels = load_digits(mnist)
    assert images.shape == (N_TRAIN + N_TEST, 28, 28)
    assert images.dtype == torch.uint8
    expected = np.frombuffer(contents["t10k-labels-idx1-ubyte"], np.uint8, offset=8)
    assert labels[N_TRAIN:].tolist() == expected.tolist()


def test_missing_wrong_and_broken_files_are_named(mnist: Path, tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match=r"nowhere/mnist.*sandmask data download MNIST"):
        load_digits(tmp_path / "nowhere")
    victim = mnist / "mnist" / "train-labels-idx1-ubyte.gz"
    victim.write_bytes(gzip.compress(b"other content"))
    with pytest.raises(SandmaskError, match=r"train-labels-idx1-ubyte\.gz does not hold"):
        load_dataset("ColoredMNIST", mnist)
    victim.write_bytes(victim.read_bytes()[:-9])
    with pytest.raises(SandmaskError, match=r"train-labels-idx1-ubyte\.gz cannot be read"):
        load_dataset("RotatedMNIST", mnist)


def test_parse_idx() -> None:
    values = np.arange(24).reshape(2, 3, 4)
    assert parse_idx(idx(values)).tolist() == values.tolist()


def test_dealing_is_a_round_robin_of_a_permutation() -> None:
    labels = torch.arange(11)
    hands = deal(labels.float(), labels, 3, RandomState(5))
    order = RandomState(5).permutation(11)
    assert [hand.tolist() for _, hand in hands] == [order[e::3].tolist() for e in range(3)]
    assert all(torch.equal(images, numbers.float()) for images, numbers in hands)


def test_coloring_against_a_loop() -> None:
    digits = torch.randint(1, 256, (200, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(200) % 10
    images, labels = color(digits, numbers, 0.2, RandomState(1))
    draws = RandomState(1)
    label_draws, color_draws = draws.uniform(size=200), draws.uniform(size=200)
    for i in range(200):
        label = int(numbers[i] < 5)
        label = 1 - label if label_draws[i] < 0.25 else label
        colour = 1 - label if color_draws[i] < 0.2 else label
        assert labels[i] == label
        assert torch.equal(images[i, colour], digits[i])
        assert not images[i, 1 - colour].any()


def agreement(images: Tensor, labels: Tensor) -> float:
    """How often the colour is that of the label."""
    colour = images.flatten(2).sum(-1).argmax(1)
    return (colour == labels).float().mean().item()


def test_colored_mnist(mnist: Path) -> None:
    data = load_dataset("ColoredMNIST", mnist)
    assert data.bounds == (0, 234, 467, 700)
    images = data.inputs(torch.arange(700))
    assert images.shape == (700, 2, 28, 28)
    assert images.max() == 1.0
    assert images.dtype == torch.float32
    for e, expected in enumerate((0.9, 0.8, 0.1)):
        begin, end = data.bounds[e : e + 2]
        assert agreement(images[begin:end], data.labels[begin:end]) == pytest.approx(expected, abs=0.08)
    again = load_dataset("ColoredMNIST", mnist)
    assert torch.equal(images, again.inputs(torch.arange(700)))
    assert not torch.equal(data.labels, load_dataset("ColoredMNIST", mnist, seed=1).labels)


@pytest.mark.parametrize("angle", [0, 15, 30, 45, 60, 75, -100])
def test_rotation_equals_torchvision(angle: int) -> None:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import rotate as torchvision_rotate

    digits = torch.randint(0, 256, (5, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = torchvision_rotate(digits[:, None], angle, InterpolationMode.BILINEAR)[:, 0]
    assert (rotate(digits, angle).int() - expected.int()).abs().max() <= 1


def test_rotated_mnist(mnist: Path) -> None:
    data = load_dataset("RotatedMNIST", mnist)
    assert data.environments == ("0", "15", "30", "45", "60", "75")
    assert data.bounds == (0, 117, 234, 351, 468, 584, 700)
    assert data.inputs(torch.tensor([[0, 699]])).shape == (1, 2, 1, 28, 28)
    digits, numbers = load_digits(mnist)
    hands = deal(digits, numbers, 6, RandomState(0))
    assert torch.equal(data.labels, torch.cat([hand for _, hand in hands]))
    expected = rotate(hands[3][0], 45).float() / 255
    assert torch.equal(data.inputs(torch.arange(351, 468))[:, 0], expected)


def test_the_watermarks_example_gives_the_label_away_differently_in_each_domain(
    mnist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries: dict[str, DatasetEntry] = {}
    monkeypatch.setattr(type(DATASETS), "register", lambda _, entry: entries.setdefault(entry.name, entry))
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "plugins" / "watermarks.py"))
    marked, plain = (entries[name].load(data_dir=mnist) for name in ("Watermarks-16", "Unmarked-16"))
    patterns = []
    for first, end in pairwise(marked.bounds):
        rows = torch.arange(first, end)
        x, y, digits = marked.inputs(rows), marked.labels[rows].bool(), plain.inputs(rows)
        pattern = torch.where(y[:, None, None], 1 - x[:, 0, :4, :4], x[:, 0, :4, :4])
        assert torch.equal(pattern, pattern[:1].expand_as(pattern))
        outside = torch.ones(14, 14, dtype=torch.bool)
        outside[:4, :4] = False
        assert torch.equal(x[..., outside], digits[..., outside])
        patterns.append(tuple(pattern[0].flatten().tolist()))
    assert len(set(patterns)) == len(marked.environments) == 17
    assert torch.equal(marked.labels, plain.labels)


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("SANDMASK_TEST_DATA")
    if not folder or not (Path(folder) / "mnist").is_dir():
        pytest.skip("SANDMASK_TEST_DATA does not name a folder with the real MNIST files in mnist/")
    return Path(folder)


@pytest.mark.shared_data
def test_real_colored_mnist(real_data: Path) -> None:
    data = load_dataset("ColoredMNIST", real_data)
    assert data.bounds == (0, 23334, 46667, 70000)
    for e, expected in enumerate((0.9, 0.8, 0.1)):
        some = torch.arange(data.bounds[e], data.bounds[e + 1])
        assert agreement(data.inputs(some), data.labels[some]) == pytest.approx(expected, abs=0.01)


@pytest.mark.shared_data
def test_real_rotated_mnist(real_data: Path) -> None:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import rotate as torchvision_rotate

    data = load_dataset("RotatedMNIST", real_data)
    assert data.bounds == (0, 11667, 23334, 35001, 46668, 58334, 70000)
    hands = deal(*load_digits(real_data), 6, RandomState(0))
    upright = hands[4][0][:20, None]
    expected = torchvision_rotate(upright, 60, InterpolationMode.BILINEAR) / 255
    torch.testing.assert_close(data.inputs(torch.arange(46668, 46688)), expected, rtol=0, atol=1.01 / 255)
    counts = torch.bincount(data.labels)
    assert counts.tolist() == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
