"""Links in a folder of images: what they point to is read once, whatever they do."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sandmask.datasets import scan_images
from sandmask.errors import SandmaskError

MakeFolder = Callable[..., Path]


def reasons(root: Path) -> dict[str, str]:
    return {each.path: each.reason for each in scan_images(root).left_out}


def test_a_loop_of_links_adds_no_images(make_folder: MakeFolder) -> None:
    root = make_folder(each=2)
    before = scan_images(root)
    (root / "art" / "cat" / "up").symlink_to(root)
    (root / "art" / "cat" / "here").symlink_to(".")
    (root / "photo" / "dog" / "other").symlink_to(root / "art")
    (root / "photo" / "dog" / "self").symlink_to("self")
    after = scan_images(root)
    assert after.paths == before.paths
    assert set(reasons(root)) == {"art/cat/up", "art/cat/here", "photo/dog/other", "photo/dog/self"}
    assert reasons(root)["photo/dog/self"] == "broken link"


def test_links_between_folders_outside(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder(each=1)
    outside = tmp_path / "outside"
    for name in ("x", "y"):
        (outside / name).mkdir(parents=True)
        shutil.copy(root / "art" / "cat" / "0.png", outside / name / f"{name}.png")
    for name, other in (("x", "y"), ("y", "x")):
        (outside / name / "next").symlink_to(outside / other)
    (root / "art" / "cat" / "a").symlink_to(outside / "x")
    (root / "art" / "cat" / "b").symlink_to(outside)
    cats = [path for path in scan_images(root).paths if path.startswith("art/cat")]
    assert sorted(Path(path).name for path in cats) == ["0.png", "x.png", "y.png"]


def test_a_link_to_an_image_that_is_included(make_folder: MakeFolder) -> None:
    root = make_folder(each=2)
    (root / "art" / "cat" / "00.png").symlink_to(root / "photo" / "cat" / "1.png")  # comes first by name
    assert "photo/cat/1.png" in scan_images(root).paths
    assert reasons(root) == {"art/cat/00.png": "link to something that is included already"}


def test_domains_classes_and_images_may_be_links(make_folder: MakeFolder, tmp_path: Path) -> None:
    pool = make_folder(("p", "q"), ("cat", "dog"), each=2, root=tmp_path / "pool")
    root = tmp_path / "linked"
    (root / "second" / "dog").mkdir(parents=True)
    (root / "first").symlink_to(pool / "p")
    (root / "second" / "cat").symlink_to(pool / "q" / "cat")
    for number in range(2):
        (root / "second" / "dog" / f"{number}.png").symlink_to(pool / "q" / "dog" / f"{number}.png")
    tree = scan_images(root)
    assert tree.bounds == (0, 4, 8)
    assert tree.path(0).read_bytes() == (pool / "p" / "cat" / "0.png").read_bytes()


def test_a_domain_of_links_to_another_is_an_error_that_says_so(make_folder: MakeFolder) -> None:
    root = make_folder()
    (root / "same").symlink_to(root / "art")
    with pytest.raises(SandmaskError, match=r"same holds no images.*same \(link to something that is included"):
        scan_images(root)


def test_a_pipe_is_not_waited_for(make_folder: MakeFolder) -> None:
    root = make_folder()
    os.mkfifo(root / "art" / "cat" / "pipe.png")
    assert reasons(root) == {"art/cat/pipe.png": "not a regular file"}
