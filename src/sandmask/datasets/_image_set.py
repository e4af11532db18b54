"""A set of images: its folder, domains and classes, and how to load it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandmask.datasets._base import DatasetEntry
from sandmask.datasets._images import IMAGENET_MEAN, IMAGENET_STD, ImageDataset
from sandmask.datasets._scan import ImageTree, Listing, data_folder, find_folder, scan_images
from sandmask.datasets._store import CacheMode
from sandmask.datasets._table import Listed, tree_of_rows
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
    description: str = ""
    n_classes: int | None = None  # None: however many there are
    classes: tuple[str, ...] = ()  # empty: whatever class folders there are
    sparse: bool = False  # whether a domain may lack a class
    root: Path | None = None  # where the folder is, if not in the data folder
    listing: Listing | None = None  # its files, if they have been listed already
    table: Callable[[Path], Listed] | None = None  # reads what lists its images, where that is not the folders
    layout: str = ""  # of the folder, if it is not one folder per domain with one per class
    source: str = ""  # what to download, if it has another name
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
        tree = self._tree(root, allow_missing_classes=allow_missing_classes or self.sparse)
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

    def _tree(self, root: Path, *, allow_missing_classes: bool) -> ImageTree:
        allowed = {"allow_missing_classes": allow_missing_classes}
        if self.table is None:
            return scan_images(root, self.domains, self.classes, listing=self.listing, **allowed)
        return tree_of_rows(root, self.table(root), self.name, self.domains, self.classes, **allowed)

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
