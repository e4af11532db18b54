"""A set of images: its folder, domains and classes, and how to load it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandmask.datasets._base import DatasetEntry
from sandmask.datasets._images import IMAGENET_MEAN, IMAGENET_STD, ImageDataset
from sandmask.datasets._location import data_folder, find_folder
from sandmask.datasets._scan import ImageTree, scan_images
from sandmask.datasets._store import CacheMode
from sandmask.datasets._walk import Listing
from sandmask.errors import SandmaskError

NETWORK = "resnet50.tv_in1k"
INPUT_SHAPE = (3, 224, 224)


@dataclass(frozen=True)
class ImageSet:
    """The fixed properties of an image dataset."""

    name: str
    folder: str  # in the data folder
    environments: tuple[str, ...]  # column names of the paper's tables
    domains: tuple[str, ...]  # folder names, in the same order
    n_classes: int | None = None  # None: however many there are
    classes: tuple[str, ...] = ()  # empty: whatever class folders there are
    sparse: bool = False  # whether a domain may lack a class
    root: Path | None = None  # where the folder is, if not in the data folder
    listing: Listing | None = None  # its files, if they have been listed already

    def find(self, data_dir: Path | None = None) -> Path | None:
        """The folder of the set, or None."""
        if self.root is not None:
            return self.root
        return find_folder(data_folder(data_dir), (self.folder, self.name))

    def scan(self, data_dir: Path | None = None, *, allow_missing_classes: bool = False) -> ImageTree:
        """The images of the set, checked to be complete in domains and classes."""
        root = self.find(data_dir)
        if root is None:
            raise SandmaskError(
                f"{self.name} is not in {data_folder(data_dir) / self.folder}. Run `sandmask data download "
                f"{self.name}`, or put its folders there: {', '.join(self.domains)}, each with one per class."
            )
        tree = scan_images(
            root,
            self.domains,
            self.classes,
            allow_missing_classes=allow_missing_classes or self.sparse,
            listing=self.listing,
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

    def entry(self, description: str, checkpoint_every: int = 300) -> DatasetEntry:
        """The set as listed in the registry."""
        return DatasetEntry(
            name=self.name,
            description=description,
            environments=self.environments,
            load=self.load,
            network=NETWORK,
            scope="image",
            checkpoint_every=checkpoint_every,
            n_classes=self.n_classes,
            input_shape=INPUT_SHAPE,
            domains=self.domains,
        )
