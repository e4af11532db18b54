"""What a dataset says of its files before training, and what is found by reading them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sandmask.datasets import CorruptImageError, ImageDataset, load_dataset, scan_images, take_inventory
from sandmask.errors import SandmaskError

MakeFolder = Callable[..., Path]


def load(root: Path, **options: Any) -> ImageDataset:
    data = load_dataset(root, image_size=24, **options)
    assert isinstance(data, ImageDataset)
    return data


def test_every_file_is_used_or_named(make_folder: MakeFolder) -> None:
    root = make_folder(each=2)
    shutil.copy(root / "art" / "cat" / "0.png", root / "art" / "cat" / "x.HEIC")
    shutil.copy(root / "art" / "cat" / "0.png", root / "art" / "stray.png")
    shutil.copy(root / "art" / "cat" / "0.png", root / "art" / "cat" / "noending")
    (root / "art" / "cat" / ".ipynb_checkpoints").mkdir()
    shutil.copy(root / "art" / "cat" / "0.png", root / "art" / "cat" / ".ipynb_checkpoints" / "0.png")
    data = load(root)
    assert {each.path: each.reason for each in data.left_out} == {
        "art/cat/x.HEIC": "unknown ending .heic",
        "art/cat/noending": "no ending",
        "art/stray.png": "not in a folder of a domain and a class",
    }
    assert data.skipped == ("art/cat/noending", "art/cat/x.HEIC", "art/stray.png")
    assert data.bounds == (0, 4, 8)


def test_jfif_is_taken(make_folder: MakeFolder) -> None:
    root = make_folder(suffix=".jpg")
    (root / "art" / "cat" / "0.jpg").rename(root / "art" / "cat" / "0.JFIF")
    assert "art/cat/0.JFIF" in scan_images(root).paths
    assert load(root).inputs(torch.tensor([0])).isfinite().all()


def test_counts_by_environment_and_class(make_folder: MakeFolder) -> None:
    root = make_folder(each=2)
    (root / "photo" / "dog" / "1.png").unlink()
    (root / "photo" / "dog" / "1.heic").write_bytes(b"x")
    found = take_inventory(load(root))
    assert found.counts == ((2, 2), (2, 1))
    assert found.lines()[0].endswith(": 7 images, 2 environments, 2 classes")
    assert found.lines()[1:] == [
        "  art    4: cat 2, dog 2",
        "  photo  3: cat 2, dog 1",
        "  left out 1 (unknown ending .heic): photo/dog/1.heic",
    ]


def test_many_classes_are_summed_up(make_folder: MakeFolder) -> None:
    root = make_folder(classes=[f"c{i:02}" for i in range(13)], each=1)
    assert take_inventory(load(root)).lines()[1] == "  art    13: 1 to 1 per class"


def test_counts_of_tensors() -> None:
    found = take_inventory(load_dataset("DebugVector"))
    assert found.counts == ((32, 32),) * 3
    assert found.left_out == ()


def test_names_cannot_act_on_the_terminal(make_folder: MakeFolder) -> None:
    root = make_folder(domains=("a\x1b[2J", "b"), classes=("c\r", "d"))
    (root / "b" / "d" / "\x07.txt").write_text("x")
    text = "".join(take_inventory(load(root)).lines())
    assert text.isprintable()
    assert r"a\x1b[2J" in text


def test_a_name_that_is_not_unicode(make_folder: MakeFolder) -> None:
    root = make_folder()
    name = os.fsdecode(b"caf\xe9.png")
    try:
        shutil.copy(root / "art" / "cat" / "0.png", root / "art" / "cat" / name)
    except OSError:
        pytest.skip("this file system takes no such names")
    data = load(root)
    assert data.bounds == (0, 7, 13)
    assert data.inputs(torch.arange(13)).isfinite().all()


def test_corrupt_images_are_found_before_training_and_all_are_named(make_folder: MakeFolder) -> None:
    root = make_folder()
    (root / "photo" / "dog" / "2.png").write_bytes(b"")
    with pytest.raises(CorruptImageError, match=r"photo/dog/2\.png cannot be decoded"):
        load(root).check()
    (root / "art" / "cat" / "0.png").write_bytes(b"x")
    with pytest.raises(SandmaskError, match=r"2 images cannot.*art/cat/0\.png.*photo/dog/2\.png.*--skip-corrupt"):
        load(root).check()
    data = load(root, skip_corrupt=True)
    data.check()
    assert {each.path: each.reason for each in data.left_out} == dict.fromkeys(data.skipped, "cannot be decoded")


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_a_check_reads_images_once(make_folder: MakeFolder, cache: str) -> None:
    root = make_folder()
    data = load(root, cache=cache)
    seen: list[tuple[int, int]] = []
    data.check(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (12, 12)
    before = load(root, cache="none").inputs(torch.arange(12))
    if cache == "memory":
        shutil.rmtree(root)
    assert torch.equal(data.inputs(torch.arange(12)), before)
