"""A set of images: its folder, domains and classes, and how to load it. DomainBed's sets in folders domain/class.

- VLCS: photographs from four collections (Fang, Xu and Rockmore, ICCV 2013).
- PACS: photographs, art, cartoons and sketches (Li et al., "Deeper, broader and artier", ICCV 2017).
- OfficeHome: everyday objects in four styles (Venkateswara et al., CVPR 2017).
- TerraIncognita: animals before camera traps at four places (Beery, Van Horn and Perona, ECCV 2018).
- DomainNet: 345 kinds of objects in six styles (Peng et al., "Moment matching", ICCV 2019).
- SVIRO: seats of ten cars, rendered (Dias Da Cruz et al., "SVIRO", WACV 2020), in the authors' archive for DomainBed.
"""

import hashlib
import os
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandmask.datasets._base import DatasetEntry
from sandmask.datasets._images import IMAGENET_MEAN, IMAGENET_STD, ImageDataset
from sandmask.datasets._scan import Listing, data_folder, find_folder, list_files
from sandmask.datasets._store import CacheMode
from sandmask.datasets._tree import ImageTree, Listed, domain_folders, scan_images, sort_images, tree_of_rows
from sandmask.errors import SandmaskError

NETWORK = "resnet50.tv_in1k"
INPUT_SHAPE = (3, 224, 224)
SAMPLED_FILES, SAMPLED_BYTES = 32, 2**20  # contents that are part of an id, because files may all have one size


@dataclass(frozen=True)
class ImageSet:
    """The fixed properties of an image dataset."""

    name: str
    folder: str  # in the data folder
    environments: tuple[str, ...]  # column names of the paper's tables
    domains: tuple[str, ...]  # folder names, in the same order
    description: str = ""
    n_classes: int | None = None  # None: any number
    classes: tuple[str, ...] = ()  # empty: the names of the class folders
    sparse: bool = False  # whether a domain may lack a class
    root: Path | None = None  # where the folder is, if not in the data folder
    listing: Listing | None = None  # its files, if they have been listed already
    table: Callable[[Path], Listed] | None = None  # lists its images, if they are not in folders domain/class
    layout: str = ""  # of the folder, for messages, if it is not domain/class
    source: str = ""  # name of its download, if it is another one
    checkpoint_every: int = 300
    report_envs: tuple[int, ...] | None = None  # see `DatasetEntry`

    def find(self, data_dir: Path | None = None) -> Path | None:
        """The folder of the set, or None."""
        if self.root is not None:
            return self.root
        return find_folder(data_folder(data_dir), (self.folder, self.name))

    def scan(self, data_dir: Path | None = None, *, allow_missing_classes: bool = False) -> ImageTree:
        """The images of the set, checked to be complete in domains and classes."""
        root = self.find(data_dir)
        if root is None:
            layout = self.layout or f"{', '.join(self.domains)}, each with one folder per class"
            raise SandmaskError(
                f"{self.name} is not in {data_folder(data_dir) / self.folder}. Run `sandmask data download "
                f"{self.source or self.name}`, or put there: {layout}."
            )
        allowed = {"allow_missing_classes": allow_missing_classes or self.sparse}
        if self.table is None:
            tree = scan_images(root, self.domains, self.classes, listing=self.listing, **allowed)
        else:
            tree = tree_of_rows(root, self.table(root), self.name, self.domains, self.classes, **allowed)
        if len(tree.domains) != len(self.environments):
            raise SandmaskError(
                f"{root} holds {len(tree.domains)} domains, and {self.name} has {len(self.environments)}: "
                f"{', '.join(tree.domains)}."
            )
        if self.n_classes not in (None, len(tree.classes)):
            raise SandmaskError(
                f"{root} holds {len(tree.classes)} classes, and {self.name} has {self.n_classes}: something "
                "is missing or does not belong there."
            )
        return tree

    def load(
        self,
        data_dir: Path | None = None,
        *,
        image_size: int = 224,
        storage_size: int | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        cache: CacheMode = "auto",
        workers: int | None = None,
        skip_corrupt: bool = False,
        allow_missing_classes: bool = False,
    ) -> ImageDataset:
        """The dataset; see `ImageDataset` for the options."""
        return ImageDataset(
            self.name,
            self.scan(data_dir, allow_missing_classes=allow_missing_classes),
            environments=self.environments,
            image_size=image_size,
            storage_size=storage_size,
            mean=mean,
            std=std,
            cache=cache,
            workers=workers,
            skip_corrupt=skip_corrupt,
        )

    def entry(self) -> DatasetEntry:
        """The set as listed in the registry."""
        return DatasetEntry(
            name=self.name,
            description=self.description,
            environments=self.environments,
            load=self.load,
            network=NETWORK,
            scope="image",
            checkpoint_every=self.checkpoint_every,
            report_envs=self.report_envs,
            n_classes=self.n_classes,
            input_shape=INPUT_SHAPE,
            domains=self.domains,
        )


def folder_entry(root: Path) -> DatasetEntry:
    """A registry entry for a user's own folder root/domain/class/*.jpg: its subfolders are the environments.

    Its name is the folder's name and an id of its images, such as `photos-3f2a9c51`, which does not depend on its path.
    """
    root = root.expanduser().resolve()
    domains = domain_folders(root)
    listing = list_files(root)
    images, _ = sort_images(listing)
    number = content_id(root, [row.path for row in images])
    return own_entry(root.name, number, domains, description="A folder of images", root=root, listing=listing)


def own_entry(stem: str, number: str, domains: tuple[str, ...], **fields: Any) -> DatasetEntry:
    """A registry entry for a user's own images, named after their folder or file and an id of their content."""
    return ImageSet(own_name(stem, number), stem, domains, domains, **fields).entry()


def own_name(stem: str, number: str) -> str:
    """The name of a user's own data: that of their folder or file, and an id of their content."""
    stem = "".join(letter if letter.isprintable() else "_" for letter in stem) or "images"
    return f"{stem}-{number}"


def content_id(root: Path, paths: Sequence[str], labels: bytes = b"") -> str:
    """A hash of the images' names and sizes, the contents of some, and `labels`. Copies of a folder have the same."""
    total = hashlib.sha256(labels)
    ordered = sorted((unicodedata.normalize("NFC", path), path) for path in paths)  # systems spell names differently
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


VLCS = ImageSet(
    name="VLCS",
    description="Photographs of birds, cars, chairs, dogs and people from four collections",
    folder="VLCS",
    environments=("C", "L", "S", "V"),
    domains=("Caltech101", "LabelMe", "SUN09", "VOC2007"),
    n_classes=5,
    classes=("bird", "car", "chair", "dog", "person"),
)
PACS = ImageSet(
    name="PACS",
    description="Seven kinds of objects as art, cartoon, photo and sketch",
    folder="PACS",
    environments=("A", "C", "P", "S"),
    domains=("art_painting", "cartoon", "photo", "sketch"),
    n_classes=7,
    classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
)
OFFICE_HOME = ImageSet(
    name="OfficeHome",
    description="65 kinds of everyday objects as art, clip art, product pictures and photos",
    folder="office_home",
    environments=("A", "C", "P", "R"),
    domains=("Art", "Clipart", "Product", "Real World"),
    n_classes=65,
)
LOCATIONS = ("100", "38", "43", "46")
TERRA_INCOGNITA = ImageSet(
    name="TerraIncognita",
    description="Ten kinds of animals (or none) before camera traps at four places",
    folder="terra_incognita",
    environments=tuple(f"L{location}" for location in LOCATIONS),
    domains=tuple(f"location_{location}" for location in LOCATIONS),
    n_classes=10,
    classes=("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel"),
    sparse=True,  # not every animal passes every camera
)
DOMAIN_NET = ImageSet(
    name="DomainNet",
    description="345 kinds of objects in six styles",
    folder="domain_net",
    environments=("clip", "info", "paint", "quick", "real", "sketch"),
    domains=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    n_classes=345,
    checkpoint_every=1000,
)
CARS = ("aclass", "escape", "hilux", "i3", "lexus", "tesla", "tiguan", "tucson", "x5", "zoe")
SVIRO = ImageSet("SVIRO", "sviro", CARS, CARS, "Occupants of the rear seats of ten rendered cars", n_classes=7)
