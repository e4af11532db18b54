"""Of several processes that train one run, each decodes only the images that it reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sandmask.api._images import check_images
from sandmask.datasets import ImageDataset, _decode, _store, dataset_entry, load_dataset
from sandmask.functional.ranks import Ranks
from sandmask.records import RunSpec
from sandmask.training import make_spec
from sandmask.training.stack import Stack

CPU = torch.device("cpu")
DOMAINS, BATCH = ("ink", "oil", "photo", "sketch"), 4  # of which one is held out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, draws = tmp_path_factory.mktemp("images"), np.random.RandomState(0)
    for number, domain in enumerate(DOMAINS):
        for name in ("bright", "dark"):
            (root / domain / name).mkdir(parents=True)
            for i in range(20):
                pixels = draws.randint(0, 255, (40, 40 + number, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / domain / name / f"{i}.png")
    return root


def images(folder: Path) -> ImageDataset:
    dataset = load_dataset(folder, image_size=32, cache="none")
    assert isinstance(dataset, ImageDataset)
    return dataset


def spec_of(folder: Path, algorithm: str) -> RunSpec:
    hparams = {"batch_size": BATCH}
    entry = dataset_entry(str(folder))
    return make_spec(entry, algorithm, test_envs=[0], network="resnet18", weights="none", hparams=hparams, steps=3)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The images that are decoded, in any order."""
    found: list[Path] = []

    def watched(path: Path, *args: Any) -> Any:
        found.append(path)
        return _decode.decode(path, *args)

    monkeypatch.setattr(_store, "decode", watched)
    return found


@pytest.mark.parametrize(
    ("algorithm", "size", "read"),
    [
        ("ERM", 2, 6),  # of 12
        ("ERM", 3, 4),
        ("SANDMask", 2, 6),  # an environment, and half of the third
        ("SANDMask", 3, 4),
        ("SANDMask+VREx", 2, 6),
        ("Mixup", 2, 12),  # it mixes examples that other processes would read
    ],
)
def test_a_process_decodes_what_it_reads_and_gets_the_same_numbers(
    folder: Path, decoded: list[Path], algorithm: str, size: int, read: int
) -> None:
    spec = spec_of(folder, algorithm)
    whole = list(Stack([spec], images(folder), CPU, weights="none").feed(0))
    assert len(decoded) == spec.steps * 12
    counts = torch.zeros(len(DOMAINS) - 1, BATCH)
    for rank in range(size):
        decoded.clear()
        stack = Stack([spec], images(folder), CPU, weights="none", ranks=Ranks(rank, size))
        own = list(stack.feed(0))
        assert len(decoded) == spec.steps * read
        for batch, alone in zip(own, whole, strict=True):
            is_read = ~batch.x.isnan().flatten(3).any(-1)
            assert torch.equal(batch.x[is_read], alone.x[is_read])
            assert is_read.sum() == read
            assert all(torch.equal(one, other) for one, other in zip(batch[1:], alone[1:], strict=True))
        counts += is_read[0]
    assert (counts == (size if read == 12 else 1)).all()  # together, all of them


def test_processes_divide_the_check_of_all_images(folder: Path, decoded: list[Path]) -> None:
    dataset = images(folder)
    for rank in range(3):
        before = len(decoded)
        check_images(dataset, "none", keep=True, ranks=Ranks(rank, 3))
        assert len(decoded) - before in (53, 54)
    assert len(decoded) == len(set(decoded)) == 160
    dataset.check()
    assert len(decoded) == 320  # none of them has checked all
    dataset.check()
    assert len(decoded) == 320
