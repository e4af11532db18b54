"""A user's own images: root/domain/class/*.jpg, any number of domains and classes."""

import hashlib
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from sandmask.datasets._base import DatasetEntry
from sandmask.datasets._image_set import ImageSet
from sandmask.datasets._scan import list_files, sort_images, subfolders
from sandmask.errors import SandmaskError

SAMPLED_FILES, SAMPLED_BYTES = 32, 2**20  # whose contents count, too: images of one format may all have one size


def entry_of(root: Path) -> DatasetEntry:
    """A registry entry for the folder: its subfolders are the environments.

    Its name is the folder's name and an id of its images, such as `photos-3f2a9c51`, wherever the folder lies.
    """
    root = root.expanduser().resolve()
    if not root.is_dir():
        raise SandmaskError(
            f"There is no folder {root}. It should hold one folder per domain, each with one per class."
        )
    domains = tuple(folder.name for folder in subfolders(root))
    listing = list_files(root)
    images, _ = sort_images(listing)
    paths = [path for classes in images.values() for files in classes.values() for path in files]
    name = f"{recordable(root.name) or 'images'}-{content_id(root, paths)}"
    return ImageSet(name, root.name, domains, domains, "A folder of images", root=root, listing=listing).entry()


def recordable(name: str) -> str:
    """A name as records hold it: as text that any system can print."""
    return "".join(letter if letter.isprintable() else "_" for letter in name)


def content_id(root: Path, paths: Sequence[str], said: bytes = b"") -> str:
    """A hash of the images' names and sizes, and of the contents of some: a copy of the folder has the same.

    `said` is what else is known about the images, such as their classes.
    """
    total = hashlib.sha256(said)
    ordered = sorted((unicodedata.normalize("NFC", path), path) for path in paths)  # as systems spell names differently
    every = max(1, len(ordered) // SAMPLED_FILES)
    for number, (spelled, path) in enumerate(ordered):
        try:
            total.update(f"{(root / path).stat().st_size} {spelled}\0".encode(errors="surrogateescape"))
            if number % every == 0:
                with (root / path).open("rb") as file:
                    total.update(file.read(SAMPLED_BYTES))
        except OSError as error:
            raise SandmaskError(f"{root / path} cannot be read ({os.strerror(error.errno or 0)}).") from error
    return total.hexdigest()[:8]
