import json
from pathlib import Path

import pytest

from sandmask.datasets._prepare import (
    move_domains,
    prepare_domain_net,
    prepare_terra_incognita,
)
from sandmask.datasets.image_sets import DOMAIN_NET
from sandmask.errors import SandmaskError

CATEGORIES = [{"id": 1, "name": "bird"}, {"id": 2, "name": "dog"}, {"id": 3, "name": "skunk"}]


def annotations(folder: Path, name: str, images: list[tuple[str, object, list[int]]]) -> None:
    """A file of the COCO kind: (image id, location, category ids)."""
    content = {
        "images": [{"id": i, "file_name": f"{i}.jpg", "location": where} for i, where, _ in images],
        "annotations": [{"image_id": i, "category_id": kind} for i, _, kinds in images for kind in kinds],
        "categories": CATEGORIES,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def camera_traps(tmp_path: Path) -> Path:
    """Extracted archives in miniature: files that overlap, places and animals that are not wanted."""
    extracted = tmp_path / "extracted"
    files = extracted / "eccv_18_annotation_files"
    annotations(files, "train.json", [("a", 38, [1]), ("b", "100", [2, 2]), ("c", 7, [1]), ("d", 43, [3])])
    annotations(files, "cis_val.json", [("a", 38, [1]), ("e", 46, [1, 2]), ("f", 46, [])])
    (files / "other.json").write_text("[1, 2]")
    pictures = extracted / "eccv_18_all_images_sm"
    pictures.mkdir()
    for name in "abcdefg":
        (pictures / f"{name}.jpg").write_text(name)
    return extracted


def test_terra_takes_its_places_and_classes(camera_traps: Path, tmp_path: Path) -> None:
    note = prepare_terra_incognita(camera_traps, tmp_path / "ready")
    found = {path.relative_to(tmp_path / "ready").as_posix() for path in (tmp_path / "ready").rglob("*.jpg")}
    assert found == {
        "location_38/bird/a.jpg",
        "location_100/dog/b.jpg",
        "location_46/bird/e.jpg",
        "location_46/dog/e.jpg",
    }
    assert (tmp_path / "ready" / "location_38" / "bird" / "a.jpg").read_text() == "a"
    assert note.startswith("4 images")


def test_terra_misses_an_annotated_image(camera_traps: Path, tmp_path: Path) -> None:
    (camera_traps / "eccv_18_all_images_sm" / "b.jpg").unlink()
    with pytest.raises(SandmaskError, match=r"1 annotated images are not in the archive, such as b\.jpg"):
        prepare_terra_incognita(camera_traps, tmp_path / "ready")


def test_terra_without_annotations(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(SandmaskError, match="no annotations"):
        prepare_terra_incognita(tmp_path / "x", tmp_path / "ready")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ('{"images": [{}], "annotations": [], "categories": []}', "not a file of annotations as published"),
        ('{"images": 3, "annotations": [], "categories": []}', "not a file of annotations as published"),
    ],
)
def test_terra_incognita_with_damaged_annotations(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(SandmaskError, match=rf"x\.json .*{message}"):
        prepare_terra_incognita(tmp_path, tmp_path / "ready")


def test_domain_net_drops_repeated_images_of_a_class(tmp_path: Path) -> None:
    extracted = tmp_path / "extracted"
    for domain in DOMAIN_NET.domains:
        for kind in ("axe", "zebra"):
            folder = extracted / domain / kind
            folder.mkdir(parents=True)
            for name, content in (
                ("1", "same"),
                ("2", "else"),
                ("3", "same"),
                ("4", "same"),
                ("5", "longer one"),
            ):
                (folder / f"{name}.jpg").write_text(content)
    note = prepare_domain_net(extracted, tmp_path / "ready")
    assert note == "24 duplicate images removed"
    for domain in DOMAIN_NET.domains:
        for kind in ("axe", "zebra"):
            assert sorted(path.name for path in (tmp_path / "ready" / domain / kind).iterdir()) == [
                "1.jpg",
                "2.jpg",
                "5.jpg",
            ]


@pytest.mark.parametrize("wrapping", [".", "kfold", "pacs/images", "Homework3-PACS-master/PACS"])
def test_domains_are_found_however_they_are_wrapped(tmp_path: Path, wrapping: str) -> None:
    for domain in ("art", "Real World"):
        (tmp_path / "in" / wrapping / domain / "dog").mkdir(parents=True)
        (tmp_path / "in" / wrapping / domain / "dog" / "1.jpg").touch()
    (tmp_path / "in" / "splits" / "art").mkdir(parents=True)  # of that name, but without class folders
    move_domains(tmp_path / "in", tmp_path / "out", ("art", "real_world"))
    assert (tmp_path / "out" / "art" / "dog" / "1.jpg").exists()
    assert (tmp_path / "out" / "real_world" / "dog" / "1.jpg").exists()


def test_an_archive_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "in" / "art" / "dog").mkdir(parents=True)
    with pytest.raises(SandmaskError, match="holds no folder 'photo'"):
        move_domains(tmp_path / "in", tmp_path / "out", ("art", "photo"))
