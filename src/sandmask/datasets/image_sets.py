"""The image datasets of DomainBed that have folders domain/class, and registry entries for a user's own images.

- VLCS: photographs from four collections (Fang, Xu and Rockmore, ICCV 2013).
- PACS: photographs, art, cartoons and sketches (Li et al., "Deeper, broader and artier", ICCV 2017).
- OfficeHome: everyday objects in four styles (Venkateswara et al., CVPR 2017).
- TerraIncognita: animals in front of camera traps at four places (Beery, Van Horn and Perona, ECCV 2018).
- DomainNet: 345 kinds of objects in six styles (Peng et al., "Moment matching", ICCV 2019).
- SVIRO: rendered seats of ten cars (Dias Da Cruz et al., "SVIRO", WACV 2020), from the authors' archive for DomainBed.
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
SAMPLED_FILES, SAMPLED_BYTES = 32, 2**20  # contents that are part of an id, because all files may have the same size


@dataclass(frozen=True)
class ImageSet:
    """The fixed properties of an image dataset."""

    name: str
    folder: str  # name of its folder in the data folder
    environments: tuple[str, ...]  # column names of the paper's tables
    domains: tuple[str, ...]  # folder names, in the same order
    description: str = ""
    n_classes: int | None = None  # None means any number
    classes: tuple[str, ...] = ()  # if empty, the names of the class folders
    sparse: bool = False  # whether a domain may lack a class
    root: Path | None = None  # the folder, if it is not in the data folder
    listing: Listing | None = None  # its files, if they have been listed already
    table: Callable[[Path], Listed] | None = None  # lists its images, if they are not in folders domain/class
    layout: str = ""  # layout of the folder in messages, if it is not domain/class
    source: str = ""  # name of its download, if it differs from `name`
    checkpoint_every: int = 300
    report_envs: tuple[int, ...] | None = None  # see `DatasetEntry`

    def find(self, data_dir: Path | None = None) -> Path | None:
        """Return the folder of the dataset, or None."""
        if self.root is not None:
            return self.root
        return find_folder(data_folder(data_dir), (self.folder, self.name))

    def scan(self, data_dir: Path | None = None, *, allow_missing_classes: bool = False) -> ImageTree:
        """Return the images of the dataset. Raise an error if a domain or a class is missing."""
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
                f"{root} holds {len(tree.classes)} classes, and {self.name} has {self.n_classes}. A class folder is "
                "missing, or another folder does not belong there."
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
        """Load the dataset. See `ImageDataset` for the options."""
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
        """Return the entry of the dataset in the registry."""
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
    """Return a registry entry for a user's own folder root/domain/class/*.jpg, whose subfolders are the environments.

    The name of the entry is the name of the folder and a hash of its images, such as `photos-3f2a9c51`. It does not
    depend on the path of the folder.
    """
    root = root.expanduser().resolve()
    domains = domain_folders(root)
    listing = list_files(root)
    images, _ = sort_images(listing)
    number = content_id(root, [row.path for row in images])
    return own_entry(root.name, number, domains, description="A folder of images", root=root, listing=listing)


def own_entry(stem: str, number: str, domains: tuple[str, ...], **fields: Any) -> DatasetEntry:
    """Return a registry entry for a user's own images. See `own_name` for its name."""
    return ImageSet(own_name(stem, number), stem, domains, domains, **fields).entry()


def own_name(stem: str, number: str) -> str:
    """Return the name of a user's own data: the name of the folder or file, and a hash of the content."""
    stem = "".join(letter if letter.isprintable() else "_" for letter in stem) or "images"
    return f"{stem}-{number}"


def content_id(root: Path, paths: Sequence[str], labels: bytes = b"") -> str:
    """Return a hash of the names and sizes of images, the contents of some, and `labels`, which is equal for copies."""
    total = hashlib.sha256(labels)
    ordered = sorted((unicodedata.normalize("NFC", path), path) for path in paths)  # systems encode names differently
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
    description="Ten kinds of animals (or none) in front of camera traps at four places",
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
