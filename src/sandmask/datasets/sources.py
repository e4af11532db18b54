"""Download addresses of the datasets, which `sandmask.datasets.download` uses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sandmask.datasets import image_sets, spawrious, wilds
from sandmask.datasets._base import DATASETS
from sandmask.datasets._prepare import (
    move_domains,
    move_files,
    move_folder,
    prepare_domain_net,
    prepare_terra_incognita,
)
from sandmask.datasets.mnist import CONTENT_MD5, find_mnist
from sandmask.errors import SandmaskError
from sandmask.registry import Registry, closest

DRIVE = "gdrive:"  # followed by the id of a file on Google Drive
WANG = "https://wjdcloud.blob.core.windows.net/dataset"  # mirrors of Jindong Wang's collection


@dataclass(frozen=True)
class RemoteFile:
    """A file to download from the first mirror that has it."""

    name: str
    mirrors: tuple[str, ...]  # http(s) addresses, or "gdrive:" and a file's id
    md5: str | None = None
    size: int | None = None
    archive: bool = True


@dataclass(frozen=True)
class Source:
    """The source of one or more datasets: files to download, and how to prepare them."""

    name: str
    folder: str  # name of its folder in the data folder
    datasets: tuple[str, ...]  # names of the datasets that use it
    files: tuple[RemoteFile, ...]
    prepare: Callable[[Path, Path], str]  # (extracted files, folder to fill) -> a note for the user
    images: image_sets.ImageSet | None = None
    counts: dict[str, int] = field(default_factory=dict)  # number of images by domain, if known

    def find(self, data_dir: Path) -> Path | None:
        """Return the folder of the data, or None."""
        return self.images.find(data_dir) if self.images is not None else find_mnist(data_dir)


SOURCES: Registry[Source] = Registry("data source")


def _add(
    images: image_sets.ImageSet,
    files: dict[str, tuple[str, ...]],
    prepare: Callable[[Path, Path], str] | None = None,
    counts: Sequence[int] = (),
    datasets: tuple[str, ...] = (),
) -> None:
    """Register the source of an image dataset. `files` has the mirrors of archives by name."""
    remote = tuple(RemoteFile(name, mirrors) for name, mirrors in files.items())
    move = prepare or partial(move_domains, domains=images.domains)
    known = dict(zip(images.domains, counts, strict=True)) if counts else {}
    SOURCES.register(Source(images.name, images.folder, datasets or (images.name,), remote, move, images, known))


def _mnist_file(name: str, md5: str, size: int) -> RemoteFile:
    hosts = ("ossci-datasets.s3.amazonaws.com/mnist", "storage.googleapis.com/cvdf-datasets/mnist")
    return RemoteFile(f"{name}.gz", tuple(f"https://{host}/{name}.gz" for host in hosts), md5, size, archive=False)


SOURCES.register(
    Source(
        name="MNIST",
        folder="mnist",
        datasets=("ColoredMNIST", "RotatedMNIST"),
        files=(
            _mnist_file("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9912422),
            _mnist_file("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432", 28881),
            _mnist_file("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3", 1648877),
            _mnist_file("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c", 4542),
        ),
        prepare=partial(move_files, names=tuple(f"{name}.gz" for name in CONTENT_MD5)),
    )
)
_add(
    image_sets.VLCS,
    {"VLCS.tar.gz": (f"{DRIVE}1skwblH1_okBwxWxmRsp9_qi15hyPpxg8", f"{WANG}/VLCS/VLCS.zip")},
    counts=(1415, 2656, 3282, 3376),
)
_PACS = (
    f"{DRIVE}1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd",
    f"{DRIVE}1m4X4fROCCXMO0lRLrr6Zz9Vb3974NWhE",
    "https://github.com/MachineLearning2020/Homework3-PACS/archive/refs/heads/master.zip",
    f"{WANG}/PACS.zip",
)
_add(image_sets.PACS, {"PACS.zip": _PACS}, counts=(2048, 2344, 1670, 3929))
_OFFICE_HOME = (
    f"{DRIVE}1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC",
    f"{DRIVE}0B81rNlvomiwed0V1YUxQdC1uOTg",
    f"{WANG}/OfficeHome.zip",
)
_add(image_sets.OFFICE_HOME, {"office_home.zip": _OFFICE_HOME}, counts=(2427, 4365, 4439, 4357))
_TERRA = "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps"
_add(
    image_sets.TERRA_INCOGNITA,
    {name: (f"{_TERRA}/{name}",) for name in ("eccv_18_all_images_sm.tar.gz", "eccv_18_annotations.tar.gz")},
    prepare_terra_incognita,
)
_VISDA = "csr.bu.edu/ftp/visda/2019/multi-source"
_add(
    image_sets.DOMAIN_NET,
    {
        f"{path.split('/')[-1]}.zip": (f"https://{_VISDA}/{path}.zip", f"http://{_VISDA}/{path}.zip")
        for path in ("groundtruth/clipart", "infograph", "groundtruth/painting", "quickdraw", "real", "sketch")
    },
    prepare_domain_net,
)
_add(image_sets.SVIRO, {"sviro_grayscale_rectangle_classification.zip": ("https://sviro.kl.dfki.de/?wpdmdl=1731",)})
_WILDS = "https://worksheets.codalab.org/rest/bundles"
_add(
    wilds.WILDS_CAMELYON,
    {"camelyon17_v1.0.tar.gz": (f"{_WILDS}/0xe45e15f39fb54e9d9e919556af67aabe/contents/blob/",)},
    partial(move_folder, marker="metadata.csv"),
    counts=wilds.COUNTS,
)
_add(
    wilds.WILDS_FMOW,
    {"fmow_v1.1.tar.gz": (f"{_WILDS}/0xaec91eb7c9d548ebb15e1b5e60f966ab/contents/blob/",)},
    partial(move_folder, marker="rgb_metadata.csv"),
)
_DROPBOX = "https://www.dropbox.com/s"
_add(
    spawrious.SPAWRIOUS,
    {
        "spawrious224.tar.gz": tuple(
            f"{_DROPBOX}/{key}/spawrious224.tar.gz?dl=1" for key in ("e40j553480h3f3s", "wc9mwza5yk66i83")
        )
    },
    partial(move_folder, marker="1"),
    counts=(len(spawrious.BREEDS) * spawrious.PER_FOLDER,) * len(spawrious.FOLDERS),
    datasets=tuple(mixture.name for mixture in spawrious.MIXTURES),
)


def source_of(name: str) -> Source:
    """Return the source of a dataset, by the name of the dataset or of the source."""
    if name in SOURCES:
        return SOURCES[name]
    for source in SOURCES.values():
        if name in DATASETS and DATASETS[name].name in source.datasets:
            return source
    if name in DATASETS:
        raise SandmaskError(f"{DATASETS[name].name} is generated. There is nothing to download or to check.")
    raise SandmaskError(f"Unknown dataset {name!r}. {closest(name, downloadable())}")


def downloadable() -> list[str]:
    """Return the names that `source_of` accepts, in the order of the registry."""
    made = [name for name in DATASETS if any(name in source.datasets for source in SOURCES.values())]
    return made + [name for name in SOURCES if name not in made]


@dataclass(frozen=True)
class Overview:
    """One row of `sandmask data list`."""

    name: str
    description: str
    environments: tuple[str, ...]
    classes: int | None
    images: int | None  # if known
    generated: bool
    path: str | None  # None if it is generated or not on this machine
    expected_at: str | None


def overview(data_dir: Path) -> list[Overview]:
    """Return a row for every registered dataset, in the order of the registry."""
    rows = []
    for entry in DATASETS.values():
        about = (entry.name, entry.description, entry.environments, entry.n_classes)
        source = next((each for each in SOURCES.values() if entry.name in each.datasets), None)
        if source is None:
            rows.append(Overview(*about, images=None, generated=True, path=None, expected_at=None))
        else:
            found, images = source.find(data_dir), sum(source.counts.values()) or None
            path, expected = None if found is None else str(found), str(data_dir / source.folder)
            rows.append(Overview(*about, images=images, generated=False, path=path, expected_at=expected))
    return rows
