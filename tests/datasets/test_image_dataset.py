import gc
import logging
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sandmask.datasets import CorruptImageError, ImageDataset, load_dataset, scan_images
from sandmask.datasets import _store as memory
from sandmask.datasets._decode import decode
from sandmask.errors import SandmaskError
from sandmask.functional.random import key_of

MakeFolder = Callable[..., Path]
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]


def by_pillow(path: Path, *sizes: int) -> Tensor:
    """DomainBed's way: Pillow reads and resizes; then to 0..1 and normalized."""
    image = Image.open(path).convert("RGB")
    for size in sizes:
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - MEAN) / STD


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".bmp"])
def test_evaluation_images_are_pillows(make_folder: MakeFolder, suffix: str) -> None:
    root = make_folder(suffix=suffix, size=(90, 70))
    data = load_dataset(root, image_size=56)
    indices = torch.tensor([[0, 11], [5, 7]])
    images = data.inputs(indices)
    assert images.shape == (2, 2, 3, 56, 56)
    tree = scan_images(root)
    expected = torch.stack([by_pillow(tree.path(int(i)), 64, 56) for i in indices.flatten()])
    assert (images.flatten(0, 1) - expected).abs().max() < 2.5 / 255 / 0.22  # rounding of two resizes


def test_images_of_one_size_are_stored_as_they_are(make_folder: MakeFolder) -> None:
    root = make_folder(size=(60, 60))
    data = load_dataset(root, image_size=56)
    expected = by_pillow(scan_images(root).path(3), 56)
    assert (data.inputs(torch.tensor(3)) - expected).abs().max() < 1.5 / 255 / 0.22
    exact = load_dataset(make_folder(root=root.parent / "exact", size=(56, 56)), image_size=56)
    path = scan_images(root.parent / "exact").path(3)
    torch.testing.assert_close(exact.inputs(torch.tensor(3)), by_pillow(path))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA"])
def test_any_kind_of_picture_is_read_as_rgb(tmp_path: Path, mode: str) -> None:
    gray = np.random.RandomState(0).randint(0, 256, (8, 8)).astype(np.uint8)
    Image.fromarray(gray).convert(mode).save(tmp_path / "x.png")
    expected = np.array(Image.open(tmp_path / "x.png").convert("RGB"))
    assert (decode(tmp_path / "x.png").pixels.numpy() == expected).all()


@pytest.mark.parametrize("cache", ["auto", "memory", "device", "none"])
def test_every_cache_gives_the_same_images(make_folder: MakeFolder, cache: str) -> None:
    root = make_folder()
    plain = load_dataset(root, image_size=24, cache="none")
    data = load_dataset(root, image_size=24, cache=cache)
    assert isinstance(data, ImageDataset)
    assert data.cached_in == ("none" if cache == "none" else "memory")
    indices = torch.tensor([[3, 3, 0], [11, 2, 5]])
    for _ in range(2):  # the second time from the cache
        assert torch.equal(data.inputs(indices), plain.inputs(indices))
        assert torch.equal(data.training_inputs(indices, key_of(1)), plain.training_inputs(indices, key_of(1)))


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_numbers_count_from_the_end_too(make_folder: MakeFolder, cache: str) -> None:
    data = load_dataset(make_folder(), image_size=24, cache=cache)
    last = data.inputs(torch.tensor([len(data.labels) - 1]))
    for _ in range(2):  # the second time from the cache
        assert torch.equal(data.inputs(torch.tensor([-1])), last)


def test_a_compiled_augmentation_normalizes_as_its_dataset(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    data = load_dataset(make_folder(), image_size=24)
    assert isinstance(data, ImageDataset)
    indices, numbers = torch.tensor([3, 1]), ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    expected = data.normalized_by(*numbers).training_inputs(indices, key_of(1))
    assert torch.equal(data.compiled().normalized_by(*numbers).training_inputs(indices, key_of(1)), expected)


def test_images_are_read_in_inference_mode(make_folder: MakeFolder) -> None:
    data, numbers = load_dataset(make_folder(), image_size=24, cache="memory"), torch.arange(3)
    with torch.inference_mode():
        found = [*data.batches([numbers, numbers])]
    assert torch.equal(torch.stack(found), data.inputs(numbers).expand(2, -1, -1, -1, -1))


def test_kept_images_are_not_read_again(make_folder: MakeFolder) -> None:
    root = make_folder()
    data = load_dataset(root, image_size=24, cache="memory")
    forgetful = load_dataset(root, image_size=24, cache="none", workers=1)
    first = data.inputs(torch.arange(6))
    assert torch.equal(forgetful.inputs(torch.arange(6)), first)
    for path in (root / "art").rglob("*.png"):
        path.unlink()
    assert torch.equal(data.inputs(torch.arange(6)), first)
    assert torch.equal(data.to(torch.device("cpu")).inputs(torch.arange(6)), first)
    with pytest.raises(SandmaskError, match=r"art/cat/0\.png cannot be read"):
        forgetful.inputs(torch.arange(6))


def test_where_images_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1000, 2000))
    assert memory.place_cache("auto", 600, cpu) == "memory"
    assert memory.place_cache("auto", 601, cpu) == "none"
    assert memory.place_cache("auto", 400, gpu) == "device"
    assert memory.place_cache("auto", 401, gpu) == "memory"
    assert memory.place_cache("auto", 601, gpu) == "none"
    assert memory.place_cache("none", 1, gpu) == "none"
    assert memory.place_cache("device", 10**9, gpu) == "device"


def corrupt(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def test_a_corrupt_image_is_named(make_folder: MakeFolder) -> None:
    root = make_folder()
    corrupt(root / "photo" / "cat" / "1.png")
    data = load_dataset(root, image_size=24)
    with pytest.raises(CorruptImageError, match=r"photo/cat/1\.png cannot be decoded.*skip_corrupt=True") as caught:
        data.inputs(torch.arange(12))
    assert caught.value.path == root / "photo" / "cat" / "1.png"
    batches = data.training_batches((torch.tensor([i]), key_of(i)) for i in range(12))
    with pytest.raises(CorruptImageError, match=r"photo/cat/1\.png"):
        list(batches)
    data.inputs(torch.arange(6))  # others still work


def test_corrupt_images_can_be_skipped(make_folder: MakeFolder, caplog: pytest.LogCaptureFixture) -> None:
    root = make_folder()
    clean = load_dataset(root, image_size=24).inputs(torch.tensor([0, 2, 5, 7, 11]))
    for name in ("art/cat/1.png", "photo/cat/0.png"):
        corrupt(root / name)
    with caplog.at_level(logging.WARNING):
        data = load_dataset(root, image_size=24, skip_corrupt=True)
    assert isinstance(data, ImageDataset)
    assert data.skipped == ("art/cat/1.png", "photo/cat/0.png")
    assert "2 corrupt images are left out" in caplog.text
    assert str(root / "art/cat/1.png") in caplog.text
    assert data.bounds == (0, 5, 10)
    assert data.labels.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert torch.equal(data.inputs(torch.tensor([0, 1, 4, 5, 9])), clean)


def test_a_damaged_png_is_corrupt_even_where_pillow_makes_do(make_folder: MakeFolder) -> None:
    path = make_folder() / "art" / "cat" / "0.png"
    path.write_bytes(path.read_bytes()[:-900] + bytes(900))
    with pytest.raises(CorruptImageError, match=r"art/cat/0\.png"):
        decode(path)


def test_a_domain_of_corrupt_images_is_an_error(make_folder: MakeFolder) -> None:
    root = make_folder()
    for path in (root / "art").rglob("*.png"):
        corrupt(path)
    with pytest.raises(SandmaskError, match=r"'art': none of its images"):
        load_dataset(root, image_size=24, skip_corrupt=True)


def test_normalization_can_be_changed(make_folder: MakeFolder) -> None:
    data = load_dataset(make_folder(), image_size=24)
    assert isinstance(data, ImageDataset)
    half = data.normalized_by((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    indices = torch.arange(4)
    torch.testing.assert_close(half.inputs(indices) * 0.5 + 0.5, data.inputs(indices) * STD + MEAN)
    assert half.inputs(indices).min() >= -1.0
    with pytest.raises(SandmaskError, match="`std` above 0"):
        data.normalized_by((0.5, 0.5, 0.5), (0.5, 0.0, 0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "memroy"}, "Did you mean 'memory'"),
        ({"workers": 0}, "`workers` should be 1 or more"),
        ({"image_size": 4}, "`image_size` should be 8 or more"),
        ({"image_size": 32, "storage_size": 16}, "`storage_size` should lie between"),
        ({"mean": (0.5,)}, "three numbers"),
        ({"skip_corupt": True}, "Did you mean 'skip_corrupt'"),
    ],
)
def test_wrong_options(make_folder: MakeFolder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SandmaskError, match=message):
        load_dataset(make_folder(), **options)


def test_no_images_at_all_may_be_asked_for(make_folder: MakeFolder) -> None:
    data = load_dataset(make_folder(), image_size=24)
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    assert data.inputs(nothing).shape == (2, 0, 3, 24, 24)
    assert data.training_inputs(nothing, key_of(0)).shape == (2, 0, 3, 24, 24)


def test_a_dataset_can_be_pickled(make_folder: MakeFolder) -> None:
    data = load_dataset(make_folder(), image_size=24)
    before = data.inputs(torch.arange(3))
    assert torch.equal(pickle.loads(pickle.dumps(data)).inputs(torch.arange(3)), before)


def test_threads_end_with_the_dataset(make_folder: MakeFolder) -> None:
    data = load_dataset(make_folder(), image_size=24, workers=3)
    assert isinstance(data, ImageDataset)
    others = set(threading.enumerate())  # of other tests' datasets, which may end at any time

    def decoders() -> list[threading.Thread]:
        found = [thread for thread in threading.enumerate() if thread.name.startswith("sandmask-decode")]
        return [thread for thread in found if thread not in others]

    data.inputs(torch.arange(12))
    assert decoders()
    data.close()
    assert not decoders()
    data.inputs(torch.arange(12))
    data.training_batches((torch.arange(3), key_of(i)) for i in range(3))
    del data
    gc.collect()
    for thread in decoders():
        thread.join(timeout=60)
    assert not decoders()
