"""A user's own images: root/domain/class/*.jpg, any number of domains and classes."""

from pathlib import Path

from sandmask.datasets._base import DatasetEntry
from sandmask.datasets._image_set import ImageSet
from sandmask.datasets._scan import subfolders
from sandmask.errors import SandmaskError


def entry_of(root: Path) -> DatasetEntry:
    """A registry entry for the folder: its subfolders are the environments, and its full path is its name."""
    root = root.expanduser().resolve()
    if not root.is_dir():
        raise SandmaskError(
            f"There is no folder {root}. It should hold one folder per domain, each with one per class."
        )
    domains = tuple(folder.name for folder in subfolders(root))
    images = ImageSet(name=str(root), folder=root.name, environments=domains, domains=domains, root=root)
    return images.entry("A folder of images")
