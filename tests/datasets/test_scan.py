import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sandmask.datasets import scan_images
from sandmask.datasets.image_sets import ImageSet
from sandmask.errors import SandmaskError

MakeFolder = Callable[..., Path]


def test_images_are_numbered_by_domain_class_and_name(make_folder: MakeFolder) -> None:
    root = make_folder(("photo", "art"), ("dog", "cat"), each=2)
    nested = root / "art" / "cat" / "more"
    nested.mkdir()
    shutil.copy(root / "art" / "cat" / "0.png", nested / "9.PNG")
    for clutter in (
        root / ".hidden",
        root / "__MACOSX",
        root / "art" / "cat" / "notes.txt",
        root / "list.txt",
    ):
        clutter.mkdir() if clutter.suffix == "" else clutter.write_text("x")
    (root / "art" / "cat" / "._0.png").write_text("x")
    tree = scan_images(root)
    assert tree.domains == ("art", "photo")
    assert tree.classes == ("cat", "dog")
    art = ("art/cat/0.png", "art/cat/1.png", "art/cat/more/9.PNG", "art/dog/0.png", "art/dog/1.png")
    assert tree.paths == (*art, "photo/cat/0.png", "photo/cat/1.png", "photo/dog/0.png", "photo/dog/1.png")
    assert tree.labels.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert tree.bounds == (0, 5, 9)


def test_given_domains_set_order_and_are_found_up_to_case_and_spaces(make_folder: MakeFolder) -> None:
    root = make_folder(("Real World", "ART", "extra"))
    tree = scan_images(root, domains=("real_world", "Art"), classes=("dog", "cat"))
    assert tree.domains == ("Real World", "ART")
    assert tree.classes == ("dog", "cat")
    assert tree.paths[0] == "Real World/dog/0.png"


def test_dropping_images_renumbers_the_rest(make_folder: MakeFolder) -> None:
    tree = scan_images(make_folder(each=2))
    left = tree.without([0, 5])
    assert left.paths == (*tree.paths[1:5], *tree.paths[6:])
    assert left.labels.tolist() == [0, 1, 1, 0, 1, 1]
    assert left.bounds == (0, 3, 6)


def test_missing_root(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match=f"There is no folder {tmp_path / 'x'}"):
        scan_images(tmp_path / "x")
    with pytest.raises(SandmaskError, match="holds no folders"):
        scan_images(tmp_path)


def test_missing_domain(make_folder: MakeFolder) -> None:
    root = make_folder()
    with pytest.raises(SandmaskError, match=f"{root / 'sketch'} is missing.*holds: art, photo"):
        scan_images(root, domains=("art", "sketch"))


def test_domain_without_images(make_folder: MakeFolder) -> None:
    root = make_folder()
    (root / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(SandmaskError, match=f"The domain {root / 'empty'} holds no images"):
        scan_images(root)


def test_class_missing_in_one_domain(make_folder: MakeFolder) -> None:
    root = make_folder()
    shutil.rmtree(root / "photo" / "dog")
    with pytest.raises(SandmaskError, match=f"{root / 'photo' / 'dog'} holds no images.*'dog'.*'photo'"):
        scan_images(root)
    tree = scan_images(root, allow_missing_classes=True)
    assert tree.classes == ("cat", "dog")
    assert tree.bounds == (0, 6, 9)


def test_folder_that_is_no_class(make_folder: MakeFolder) -> None:
    root = make_folder(classes=("cat", "dgo"))
    with pytest.raises(SandmaskError, match=f"{root / 'art' / 'dgo'} is not a class"):
        scan_images(root, classes=("cat", "dog"))


def test_a_published_set_says_where_it_should_be(make_folder: MakeFolder, tmp_path: Path) -> None:
    images = ImageSet("MySet", "my_set", ("A", "P"), ("art", "photo"), n_classes=3)
    with pytest.raises(SandmaskError, match=r"MySet is not in .*/my_set.*sandmask data download MySet"):
        images.load(tmp_path)
    make_folder(root=tmp_path / "My-Set")
    with pytest.raises(SandmaskError, match="holds 2 classes, and MySet has 3"):
        images.load(tmp_path)
