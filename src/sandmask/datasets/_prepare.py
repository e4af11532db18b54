"""Turn an extracted archive, which may have its content in nested folders, into the folder of a dataset."""

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from sandmask.datasets._scan import find_folder, subfolders
from sandmask.datasets.image_sets import DOMAIN_NET, LOCATIONS, TERRA_INCOGNITA
from sandmask.errors import SandmaskError

DEPTH = 4  # largest depth of nested folders that are searched


def move_domains(extracted: Path, target: Path, domains: Sequence[str]) -> str:
    """Move the folder of each domain to target/domain. The archives of mirrors have them in different folders."""
    target.mkdir(parents=True, exist_ok=True)
    for domain in domains:
        candidates = (find_folder(folder, [domain]) for folder in _folders(extracted))
        found = next((folder for folder in candidates if folder is not None and subfolders(folder)), None)
        if found is None:
            raise SandmaskError(
                f"The archive holds no folder {domain!r} with one folder per class. It is not the dataset, "
                "or its layout has changed."
            )
        found.rename(target / domain)
    return f"{len(domains)} domains"


def move_files(extracted: Path, target: Path, names: Sequence[str]) -> str:
    """Move the files with these names to `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        (extracted / name).rename(target / name)
    return f"{len(names)} files"


def move_folder(extracted: Path, target: Path, marker: str) -> str:
    """Move the folder that contains a file or folder named `marker` to `target`."""
    found = next((folder for folder in _folders(extracted) if (folder / marker).exists()), None)
    if found is None:
        raise SandmaskError(f"The archive holds no {marker!r}. It is not the dataset, or its layout has changed.")
    found.rename(target)
    return "as in the archive"


def _folders(root: Path) -> Iterator[Path]:
    """Yield `root` and the folders under it, in order of their depth."""
    level = [root]
    for _ in range(DEPTH):
        yield from level
        level = [child for folder in level for child in subfolders(folder)]


def prepare_domain_net(extracted: Path, target: Path) -> str:
    """Move the six domains to `target` and remove duplicate images. Return a note with their number.

    DomainBed removes duplicates by a list of names. This function compares contents: of several files with the same
    content in a class folder, it keeps the first one by name.
    """
    move_domains(extracted, target, DOMAIN_NET.domains)
    duplicates = [path for domain in subfolders(target) for kind in subfolders(domain) for path in repeated(kind)]
    for path in duplicates:
        path.unlink()
    return f"{len(duplicates)} duplicate images removed"


def repeated(folder: Path) -> list[Path]:
    """Return the files with the same content as an earlier file (by name) of the same folder."""
    by_size = defaultdict(list)  # only files of the same size need to be read
    for path in sorted(folder.iterdir()):
        if path.is_file():
            by_size[path.stat().st_size].append(path)
    found = []
    for paths in by_size.values():
        if len(paths) == 1:
            continue
        seen: set[bytes] = set()
        for path in paths:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
            if digest in seen:
                found.append(path)
            seen.add(digest)
    return sorted(found)


def prepare_terra_incognita(extracted: Path, target: Path) -> str:
    """Copy the images of the four places and ten classes to target/location_N/class/. Return a note.

    All annotation files are read. They are in COCO format and may overlap. As in DomainBed, an image with annotations
    of several of the ten classes is copied to each of them.
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
    return f"{placed} images of {len(LOCATIONS)} places and {TERRA_INCOGNITA.n_classes} classes"


def chosen_images(folder: Path) -> set[tuple[str, str, str]]:
    """Return (location, class, file name) of the images to use, from the JSON files under `folder`."""
    chosen: set[tuple[str, str, str]] = set()
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and {"images", "annotations", "categories"} <= content.keys():
                chosen |= _chosen(content)
        except ValueError as error:
            raise SandmaskError(
                f"TerraIncognita: {path.name} is not valid JSON ({error}). Delete the archive and fetch it again."
            ) from error
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
            wanted = classes[image["id"]].intersection(TERRA_INCOGNITA.classes)
            chosen |= {(location, name, image["file_name"]) for name in wanted}
    return chosen
