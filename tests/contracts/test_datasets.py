"""What holds for every registered dataset, and for folders of images."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sandmask.datasets import DATASETS, Dataset, dataset_entry, load_dataset, resolve_environment
from sandmask.datasets.sources import SOURCES
from sandmask.functional.random import key_of
from sandmask.records._types import HELD_OUT
from sandmask.registry import Registry
from sandmask.reports._tables import _reported

GENERATED = ("Spirals", "Debug28", "DebugVector")
# Those in folders; tests/datasets/test_listed_sets.py has the others.
IMAGE_SETS = tuple(each.name for each in SOURCES.values() if each.images is not None and each.images.table is None)

# From the paper's protocol: environments, classes, input, network, steps, checkpoint every.
PROTOCOL = {
    "Spirals": (17, 2, (18,), "mlp", 5001, 10),
    "ColoredMNIST": (3, 2, (2, 28, 28), "mnist-convnet", 5001, 100),
    "RotatedMNIST": (6, 10, (1, 28, 28), "mnist-convnet", 5001, 100),
    "VLCS": (4, 5, (3, 224, 224), "resnet50.tv_in1k", 5001, 300),
    "PACS": (4, 7, (3, 224, 224), "resnet50.tv_in1k", 5001, 300),
    "OfficeHome": (4, 65, (3, 224, 224), "resnet50.tv_in1k", 5001, 300),
    "TerraIncognita": (4, 10, (3, 224, 224), "resnet50.tv_in1k", 5001, 300),
    "DomainNet": (6, 345, (3, 224, 224), "resnet50.tv_in1k", 5001, 1000),
    "SVIRO": (10, 7, (3, 224, 224), "resnet50.tv_in1k", 5001, 300),
    "WILDSCamelyon": (5, 2, (3, 224, 224), "resnet50.tv_in1k", 5001, 100),
    "WILDSFMoW": (6, 62, (3, 224, 224), "resnet50.tv_in1k", 5001, 100),
    **dict.fromkeys(
        [f"Spawrious{kind}_{level}" for kind in ("O2O", "M2M") for level in ("easy", "medium", "hard")],
        (3, 4, (3, 224, 224), "resnet50.tv_in1k", 5001, 100),
    ),
}


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("picture") / "x.png"
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (6, 8, 3)).astype(np.uint8)).save(path)
    return path.read_bytes()


@pytest.fixture
def load(tmp_path: Path, picture: bytes) -> Callable[[str], Dataset]:
    """Load a dataset by name; image sets from a folder that has one picture a class and domain."""

    def loader(name: str) -> Dataset:
        if name in GENERATED:
            return load_dataset(name)
        images = SOURCES[name].images if name in IMAGE_SETS else None
        domains = images.domains if images is not None else ("north", "south", "west")
        n = images.n_classes if images is not None else 2
        classes = (images.classes if images is not None else ()) or [f"class{i:03}" for i in range(n or 0)]
        root = tmp_path / (images.folder if images is not None else "mine")
        for domain in domains:
            for kind in classes:
                (root / domain / kind).mkdir(parents=True)
                (root / domain / kind / "1.png").write_bytes(picture)
        return load_dataset(name if images is not None else root, tmp_path, image_size=16, workers=1)

    return loader


def assert_is_consistent(data: Dataset) -> None:
    assert len(data.bounds) == len(data.environments) + 1
    assert data.bounds[0] == 0
    assert all(begin < end for begin, end in zip(data.bounds, data.bounds[1:], strict=False))
    assert data.labels.shape == (data.bounds[-1],)
    assert data.labels.dtype == torch.int64
    assert data.labels.min() >= 0
    assert data.labels.max() < len(data.classes)
    assert len(set(data.environments)) == len(data.environments)


def assert_serves_any_shape_of_indices(data: Dataset) -> None:
    last = data.bounds[-1] - 1
    for indices in (torch.tensor(last), torch.tensor([0, last, 0]), torch.tensor([[0, 1], [last, 2]])):
        for images in (data.inputs(indices), data.training_inputs(indices, key_of(0))):
            assert images.shape == (*indices.shape, *data.input_shape)
            assert images.dtype == torch.float32
            assert torch.isfinite(images).all()
    nothing = torch.zeros(0, dtype=torch.int64)
    assert data.inputs(nothing).shape == (0, *data.input_shape)
    both = data.inputs(torch.tensor([0, last]))
    torch.testing.assert_close(both[1], data.inputs(torch.tensor(last)))


def assert_is_repeatable(data: Dataset) -> None:
    indices = torch.tensor([[0, 1], [2, 0]])
    assert torch.equal(data.inputs(indices), data.inputs(indices))
    assert torch.equal(data.training_inputs(indices, key_of(3)), data.training_inputs(indices, key_of(3)))


def assert_streams_equal_single_requests(data: Dataset) -> None:
    requests = [(torch.tensor([i, 2]), key_of(i)) for i in range(3)]
    for served, request in zip(data.training_batches(iter(requests), depth=2), requests, strict=True):
        assert torch.equal(served, data.training_inputs(*request))
    for served, (indices, _) in zip(data.batches(indices for indices, _ in requests), requests, strict=True):
        assert torch.equal(served, data.inputs(indices))


def assert_moves(data: Dataset) -> None:
    moved = data.to(torch.device("cpu"))
    assert torch.equal(moved.labels, data.labels)
    assert torch.equal(moved.inputs(torch.tensor([1])), data.inputs(torch.tensor([1])))
    assert moved.environments == data.environments


@pytest.mark.parametrize("name", [*GENERATED, *IMAGE_SETS, "image-folder"])
def test_dataset(name: str, load: Callable[[str], Dataset], tmp_path: Path) -> None:
    data = load(name)
    assert_is_consistent(data)
    assert_serves_any_shape_of_indices(data)
    assert_is_repeatable(data)
    assert_streams_equal_single_requests(data)
    assert_moves(data)
    for e, environment in enumerate(data.environments):
        assert resolve_environment(data, environment) == e
    entry = dataset_entry(data.name if name in DATASETS else tmp_path / "mine")
    assert entry.environments == data.environments
    assert entry.n_classes in (None, len(data.classes))


def test_tables_know_the_environments_that_datasets_hold_out() -> None:
    """They are written down a second time, because `sandmask report` does without torch."""
    for entry in (*DATASETS.values(), dataset_entry("Spirals:environments=4")):
        numbers = range(len(entry.environments)) if entry.report_envs is None else entry.report_envs
        assert _reported(entry.name, entry.environments) == tuple(entry.environments[number] for number in numbers)
    entries = [entry for entry in DATASETS.values() if entry.name in HELD_OUT]
    assert [entry.name for entry in entries] == list(HELD_OUT)
    for entry in entries:
        indices = range(len(entry.environments)) if entry.report_envs is None else entry.report_envs
        assert tuple(entry.environments[index] for index in indices) == HELD_OUT[entry.name]


@pytest.mark.parametrize("name", PROTOCOL)
def test_entry_follows_the_protocol(name: str) -> None:
    entry = DATASETS[name]
    found = (len(entry.environments), entry.n_classes, entry.input_shape, entry.network, entry.steps)
    assert (*found, entry.checkpoint_every) == PROTOCOL[name]
    reported = tuple(range(16)) if name == "Spirals" else (0,) if name.startswith("Spawrious") else None
    assert entry.report_envs == reported
    expected = {"mlp": "tabular", "mnist-convnet": "small-image"}.get(entry.network, "image")
    assert entry.scope == expected
    assert entry.domains == () or len(entry.domains) == len(entry.environments)


def test_registry_is_of_frozen_records() -> None:
    assert isinstance(DATASETS, Registry)
    for entry in DATASETS.values():
        with pytest.raises(AttributeError):
            entry.steps = 1  # type: ignore[misc]


@pytest.mark.shared_data
def test_real_pacs(tmp_path: Path) -> None:
    folder = os.environ.get("SANDMASK_TEST_DATA", "")
    archive = Path(folder) / "pacs_webp70.zip"
    if not archive.is_file():
        pytest.skip("SANDMASK_TEST_DATA does not name a folder with pacs_webp70.zip")
    with zipfile.ZipFile(archive) as file:
        file.extractall(tmp_path)
    data = load_dataset("PACS", tmp_path)
    assert data.bounds == (0, 2048, 4392, 6062, 9991)
    assert_is_consistent(data)
    assert_is_repeatable(data)
    assert_streams_equal_single_requests(data)
