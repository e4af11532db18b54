"""TerraIncognita: animals before camera traps at four places (Beery, Van Horn and Perona, ECCV 2018).

The published archive has many more places and animals; DomainBed chose four and ten, and `prepare` takes
those out.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from sandmask.datasets._image_set import ImageSet
from sandmask.errors import SandmaskError

LOCATIONS = ("100", "38", "43", "46")

TERRA_INCOGNITA_IMAGES = ImageSet(
    name="TerraIncognita",
    folder="terra_incognita",
    environments=tuple(f"L{location}" for location in LOCATIONS),
    domains=tuple(f"location_{location}" for location in LOCATIONS),
    n_classes=10,
    classes=(
        "bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel",
    ),
    sparse=True,  # not every animal passes every camera
)  # fmt: skip
TERRA_INCOGNITA = TERRA_INCOGNITA_IMAGES.entry("Ten kinds of animals (or none) before camera traps at four places")


def prepare(extracted: Path, target: Path) -> str:
    """Sort the images of the four places and ten classes into target/location_N/class/; say what was done.

    The annotations are files of the COCO kind, which may overlap; all are read. An image with annotations of
    several of the ten classes is put into each of them, as DomainBed does.
    """
    by_name = {path.name: path for path in extracted.rglob("*.jpg")}
    placed = 0
    missing: list[str] = []
    for location, name, file_name in sorted(chosen_images(extracted)):
        source = by_name.get(Path(file_name).name)
        if source is None:
            missing.append(file_name)
            continue
        folder = target / f"location_{location}" / name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / source.name)
        placed += 1
    if missing:
        raise SandmaskError(
            f"TerraIncognita: {len(missing)} annotated images are not in the archive, such as {missing[0]}. "
            "It is incomplete: delete it and fetch it again."
        )
    if not placed:
        raise SandmaskError(
            f"TerraIncognita: no annotations of the locations {', '.join(LOCATIONS)} were found. Expected "
            "JSON files with `images`, `annotations` and `categories`."
        )
    return f"{placed} images of {len(LOCATIONS)} places and {TERRA_INCOGNITA_IMAGES.n_classes} classes"


def chosen_images(folder: Path) -> set[tuple[str, str, str]]:
    """(location, class, file name) of what the set uses, from the JSON files under `folder`."""
    chosen: set[tuple[str, str, str]] = set()
    for path, annotations in _annotation_files(folder):
        try:
            chosen |= _chosen(annotations)
        except (KeyError, TypeError, AttributeError) as error:
            raise SandmaskError(
                f"TerraIncognita: {path.name} is not a file of annotations as published "
                f"({type(error).__name__}: {error}). Delete the archive and fetch it again."
            ) from error
    return chosen


def _chosen(annotations: dict[str, list[dict[str, str]]]) -> set[tuple[str, str, str]]:
    chosen: set[tuple[str, str, str]] = set()
    names = {each["id"]: each["name"] for each in annotations["categories"]}
    classes = defaultdict(set)
    for each in annotations["annotations"]:
        classes[each["image_id"]].add(names[each["category_id"]])
    for image in annotations["images"]:
        location = str(image["location"])
        if location in LOCATIONS:
            wanted = classes[image["id"]].intersection(TERRA_INCOGNITA_IMAGES.classes)
            chosen |= {(location, name, image["file_name"]) for name in wanted}
    return chosen


def _annotation_files(folder: Path) -> Iterator[tuple[Path, dict[str, list[dict[str, str]]]]]:
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SandmaskError(
                f"TerraIncognita: {path.name} is not valid JSON ({error}). Delete the archive and fetch it again."
            ) from error
        if isinstance(content, dict) and {"images", "annotations", "categories"} <= content.keys():
            yield path, content
