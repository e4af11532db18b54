"""Download addresses of the datasets, which `sandmask.datasets.download` uses."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sandmask.datasets import domain_net, spawrious, terra_incognita, wilds_camelyon
from sandmask.datasets._base import DATASETS
from sandmask.datasets._image_set import ImageSet
from sandmask.datasets._mnist import CONTENT_MD5, find_mnist
from sandmask.datasets._relocate import move_domains, move_files, move_folder
from sandmask.datasets.office_home import OFFICE_HOME_IMAGES
from sandmask.datasets.pacs import PACS_IMAGES
from sandmask.datasets.sviro import SVIRO_IMAGES
from sandmask.datasets.vlcs import VLCS_IMAGES
from sandmask.datasets.wilds_camelyon import WILDS_CAMELYON_IMAGES
from sandmask.datasets.wilds_fmow import WILDS_FMOW_IMAGES
from sandmask.errors import SandmaskError
from sandmask.registry import Registry, closest

DRIVE = "gdrive:"  # then the id of a file on Google Drive
WANG = "https://wjdcloud.blob.core.windows.net/dataset"  # mirrors of Jindong Wang's collection


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch, from the first mirror that has it."""

    name: str
    mirrors: tuple[str, ...]  # http(s) addresses, or "gdrive:" and a file's id
    md5: str | None = None
    size: int | None = None
    archive: bool = True


@dataclass(frozen=True)
class Source:
    """The source of a dataset: files to fetch, and how to prepare them."""

    name: str
    folder: str  # in the data folder
    datasets: tuple[str, ...]  # that are made from it
    files: tuple[RemoteFile, ...]
    prepare: Callable[[Path, Path], str]  # (extracted files, folder to fill) -> what there is to say about it
    images: ImageSet | None = None
    counts: dict[str, int] = field(default_factory=dict)  # images by domain, where known

    def find(self, data_dir: Path) -> Path | None:
        """The folder of the data, or None."""
        return self.images.find(data_dir) if self.images is not None else find_mnist(data_dir)


def _mnist_file(name: str, md5: str, size: int) -> RemoteFile:
    hosts = ("ossci-datasets.s3.amazonaws.com/mnist", "storage.googleapis.com/cvdf-datasets/mnist")
    return RemoteFile(f"{name}.gz", tuple(f"https://{host}/{name}.gz" for host in hosts), md5, size, archive=False)


def _domains_of(images: ImageSet) -> Callable[[Path, Path], str]:
    return partial(move_domains, domains=images.domains)


SOURCES: Registry[Source] = Registry("data source")

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
SOURCES.register(
    Source(
        name="VLCS",
        folder="VLCS",
        datasets=("VLCS",),
        files=(RemoteFile("VLCS.tar.gz", (f"{DRIVE}1skwblH1_okBwxWxmRsp9_qi15hyPpxg8", f"{WANG}/VLCS/VLCS.zip")),),
        prepare=_domains_of(VLCS_IMAGES),
        images=VLCS_IMAGES,
        counts={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
    )
)
SOURCES.register(
    Source(
        name="PACS",
        folder="PACS",
        datasets=("PACS",),
        files=(
            RemoteFile(
                "PACS.zip",
                (
                    f"{DRIVE}1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd",
                    f"{DRIVE}1m4X4fROCCXMO0lRLrr6Zz9Vb3974NWhE",
                    "https://github.com/MachineLearning2020/Homework3-PACS/archive/refs/heads/master.zip",
                    f"{WANG}/PACS.zip",
                ),
            ),
        ),
        prepare=_domains_of(PACS_IMAGES),
        images=PACS_IMAGES,
        counts={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
    )
)
SOURCES.register(
    Source(
        name="OfficeHome",
        folder="office_home",
        datasets=("OfficeHome",),
        files=(
            RemoteFile(
                "office_home.zip",
                (
                    f"{DRIVE}1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC",
                    f"{DRIVE}0B81rNlvomiwed0V1YUxQdC1uOTg",
                    f"{WANG}/OfficeHome.zip",
                ),
            ),
        ),
        prepare=_domains_of(OFFICE_HOME_IMAGES),
        images=OFFICE_HOME_IMAGES,
        counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
    )
)
_TERRA = "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps"
SOURCES.register(
    Source(
        name="TerraIncognita",
        folder="terra_incognita",
        datasets=("TerraIncognita",),
        files=(
            RemoteFile("eccv_18_all_images_sm.tar.gz", (f"{_TERRA}/eccv_18_all_images_sm.tar.gz",)),
            RemoteFile("eccv_18_annotations.tar.gz", (f"{_TERRA}/eccv_18_annotations.tar.gz",)),
        ),
        prepare=terra_incognita.prepare,
        images=terra_incognita.TERRA_INCOGNITA_IMAGES,
    )
)
_VISDA = "csr.bu.edu/ftp/visda/2019/multi-source"
SOURCES.register(
    Source(
        name="DomainNet",
        folder="domain_net",
        datasets=("DomainNet",),
        files=tuple(
            RemoteFile(f"{path.split('/')[-1]}.zip", (f"https://{_VISDA}/{path}.zip", f"http://{_VISDA}/{path}.zip"))
            for path in (
                "groundtruth/clipart",
                "infograph",
                "groundtruth/painting",
                "quickdraw",
                "real",
                "sketch",
            )
        ),
        prepare=domain_net.prepare,
        images=domain_net.DOMAIN_NET_IMAGES,
    )
)
SOURCES.register(
    Source(
        name="SVIRO",
        folder="sviro",
        datasets=("SVIRO",),
        files=(RemoteFile("sviro_grayscale_rectangle_classification.zip", ("https://sviro.kl.dfki.de/?wpdmdl=1731",)),),
        prepare=_domains_of(SVIRO_IMAGES),
        images=SVIRO_IMAGES,
    )
)
_WILDS = "https://worksheets.codalab.org/rest/bundles"
SOURCES.register(
    Source(
        name="WILDSCamelyon",
        folder="camelyon17_v1.0",
        datasets=("WILDSCamelyon",),
        files=(RemoteFile("camelyon17_v1.0.tar.gz", (f"{_WILDS}/0xe45e15f39fb54e9d9e919556af67aabe/contents/blob/",)),),
        prepare=partial(move_folder, marker="metadata.csv"),
        images=WILDS_CAMELYON_IMAGES,
        counts=wilds_camelyon.COUNTS,
    )
)
SOURCES.register(
    Source(
        name="WILDSFMoW",
        folder="fmow_v1.1",
        datasets=("WILDSFMoW",),
        files=(RemoteFile("fmow_v1.1.tar.gz", (f"{_WILDS}/0xaec91eb7c9d548ebb15e1b5e60f966ab/contents/blob/",)),),
        prepare=partial(move_folder, marker="rgb_metadata.csv"),
        images=WILDS_FMOW_IMAGES,
    )
)
_DROPBOX = "https://www.dropbox.com/s"
SOURCES.register(
    Source(
        name="Spawrious",
        folder=spawrious.FOLDER,
        datasets=tuple(mixture.name for mixture in spawrious.MIXTURES),
        files=(
            RemoteFile(
                "spawrious224.tar.gz",
                (
                    f"{_DROPBOX}/e40j553480h3f3s/spawrious224.tar.gz?dl=1",
                    f"{_DROPBOX}/wc9mwza5yk66i83/spawrious224.tar.gz?dl=1",
                ),
            ),
        ),
        prepare=partial(move_folder, marker="1"),
        images=spawrious.SPAWRIOUS_IMAGES,
        counts=dict.fromkeys(spawrious.SPAWRIOUS_IMAGES.domains, len(spawrious.BREEDS) * spawrious.PER_FOLDER),
    )
)


def source_of(name: str) -> Source:
    """The source of a dataset, by the dataset's name or the source's own."""
    if name in SOURCES:
        return SOURCES[name]
    for source in SOURCES.values():
        if name in DATASETS and DATASETS[name].name in source.datasets:
            return source
    if name in DATASETS:
        raise SandmaskError(f"{DATASETS[name].name} is generated: there is nothing to download or to check.")
    raise SandmaskError(f"Unknown dataset {name!r}. {closest(name, downloadable())}")


def downloadable() -> list[str]:
    """The names that `source_of` takes, in the order of the registry."""
    made = [name for name in DATASETS if any(name in source.datasets for source in SOURCES.values())]
    return made + [name for name in SOURCES if name not in made]


@dataclass(frozen=True)
class Overview:
    """One row of `sandmask data list`."""

    name: str
    description: str
    environments: tuple[str, ...]
    classes: int | None
    images: int | None  # where known
    generated: bool
    path: str | None  # where it lies; None if it is generated or not here
    expected_at: str | None


def overview(data_dir: Path) -> list[Overview]:
    """Every registered dataset, in the registry's order."""
    rows = []
    for entry in DATASETS.values():
        source = next((each for each in SOURCES.values() if entry.name in each.datasets), None)
        found = source.find(data_dir) if source is not None else None
        rows.append(
            Overview(
                name=entry.name,
                description=entry.description,
                environments=entry.environments,
                classes=entry.n_classes,
                images=sum(source.counts.values()) or None if source is not None else None,
                generated=source is None,
                path=str(found) if found is not None else None,
                expected_at=str(data_dir / source.folder) if source is not None else None,
            )
        )
    return rows
