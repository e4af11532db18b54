"""WILDS and Spawrious, from small files of the published layouts."""

import itertools
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sandmask.datasets import DATASETS, ImageDataset, load_dataset, resolve_environment
from sandmask.datasets.download import verify
from sandmask.datasets.download._install import install
from sandmask.datasets.sources import SOURCES, RemoteFile, Source
from sandmask.datasets.spawrious import BREEDS, ENVIRONMENTS, MIXTURES, PLACES, Mixture
from sandmask.datasets.wilds import COUNTS
from sandmask.errors import SandmaskError

NUMBERS = itertools.count()


def picture(path: Path) -> None:
    """Another picture for every file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.RandomState(next(NUMBERS)).randint(0, 256, (16, 16, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def load(name: str, folder: Path, **options: bool) -> ImageDataset:
    dataset = load_dataset(name, folder, image_size=16, **options)
    assert isinstance(dataset, ImageDataset)
    return dataset


def files(data: ImageDataset, environment: int) -> list[str]:
    begin, end = data.bounds[environment : environment + 2]
    return list(data._feed.store.tree.paths[begin:end])


@pytest.fixture
def camelyon(tmp_path: Path) -> Path:
    """Two patches of each class and hospital, listed from the last hospital to the first."""
    folder = tmp_path / "camelyon17_v1.0"
    lines = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for number, (center, tumor, copy) in enumerate(itertools.product(range(4, -1, -1), (0, 1), range(2))):
        patient, node, x, y = f"{4 + center:03}", center % 3, 3328 + 32 * copy, 21792 + 32 * tumor
        slide = f"patient_{patient}_node_{node}"
        picture(folder / "patches" / slide / f"patch_{slide}_x_{x}_y_{y}.png")
        lines.append(f"{number},{patient},{node},{x},{y},{tumor},{center},{center},0")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_camelyon_has_a_hospital_as_an_environment(camelyon: Path) -> None:
    data = load("WILDSCamelyon", camelyon.parent)
    assert data.environments == tuple(f"hospital_{number}" for number in range(5))
    assert data.classes == ("normal", "tumor")
    assert data.bounds == (0, 4, 8, 12, 16, 20)
    assert data.labels.tolist() == [0, 0, 1, 1] * 5
    assert all(
        path.startswith("patches/patient_006_node_2/") for path in files(data, 2)
    )  # center 2 is patient 006 here
    data.check()
    assert sum(COUNTS) == 455_954  # of the WILDS paper


def test_camelyon_examples_are_in_the_order_of_the_file(camelyon: Path) -> None:
    """As in DomainBed, so that the splits are the same."""
    header, *lines = (camelyon / "metadata.csv").read_text().splitlines()
    (camelyon / "metadata.csv").write_text("\n".join([header, *lines[::-1]]))
    assert load("WILDSCamelyon", camelyon.parent).labels.tolist() == [1, 1, 0, 0] * 5


def test_verify_names_a_listed_file_that_is_missing(camelyon: Path) -> None:
    missing = next(camelyon.rglob("*.png"))
    missing.unlink()
    checked = verify(SOURCES["WILDSCamelyon"], camelyon.parent)
    assert checked.status == "wrong"
    assert f"{missing} cannot be read: No such file or directory" in checked.problems


def test_bad_metadata_is_one_line(camelyon: Path) -> None:
    text = (camelyon / "metadata.csv").read_text()
    (camelyon / "metadata.csv").write_text(text.replace(",1,4,4,0", ",x,4,4,0", 1))
    with pytest.raises(SandmaskError, match=r"metadata\.csv, row 4: tumor should be 0 or 1. Found 'x'"):
        load("WILDSCamelyon", camelyon.parent)
    (camelyon / "metadata.csv").write_text(text.replace("center", "centre", 1))
    with pytest.raises(SandmaskError, match=r"no column 'center'"):
        load("WILDSCamelyon", camelyon.parent)
    (camelyon / "metadata.csv").unlink()
    with pytest.raises(SandmaskError, match=r"There is no file .*metadata\.csv"):
        load("WILDSCamelyon", camelyon.parent)
    with pytest.raises(SandmaskError, match=r"data download WILDSCamelyon.*metadata\.csv and patches/"):
        load("WILDSCamelyon", camelyon.parent / "elsewhere")


@pytest.fixture
def fmow(tmp_path: Path) -> Path:
    folder = tmp_path / "fmow_v1.1"
    countries = {"IND": "Asia", "FRA": "Europe", "KEN": "Africa", "USA": "Americas", "FJI": "Oceania", "ATA": ""}
    order = ["FRA", "IND", "KEN", "USA", "FJI", "XKX", "ATA"]
    lines = ["split,img_filename,country_code,category,timestamp"]
    categories = [f"kind_{number:02}" for number in range(62)] * 2
    for number, (country, category) in enumerate(zip(itertools.cycle(order), categories, strict=False)):
        split = "seq" if number in (1, 77) else ("train", "val", "test")[number % 3]
        lines.append(f"{split},x.tif,{country},{category},2010-01-01T00:00:00Z")
        if split != "seq":
            picture(folder / "images" / f"rgb_img_{number}.png")
    (folder / "rgb_metadata.csv").write_text("\n".join(lines))
    rows = [f"{name},{code[:2]},{code},{region}" for name, (code, region) in enumerate(countries.items())]
    (folder / "country_code_mapping.csv").write_text("\n".join(["name,alpha-2,alpha-3,region", *rows]))
    return folder


def test_fmow_has_a_region_as_an_environment(fmow: Path) -> None:
    data = load("WILDSFMoW", fmow.parent)
    assert data.environments == tuple(f"region_{number}" for number in range(6))
    assert data.domains == ("Europe", "Asia", "Africa", "Americas", "Oceania", "Other")  # by first occurrence
    assert resolve_environment(data, "Asia") == resolve_environment(data, "region_1") == 1
    assert len(data.labels) == 124 - 2  # without the sequestered ones
    assert files(data, 0)[:2] == ["images/rgb_img_0.png", "images/rgb_img_7.png"]
    assert files(data, 1)[0] == "images/rgb_img_8.png"  # 1 is sequestered
    assert files(data, 5)[:3] == [f"images/rgb_img_{number}.png" for number in (5, 6, 12)]  # no region known, or empty
    assert len(data.classes) == 62
    data.check()


@pytest.fixture
def spawrious(tmp_path: Path) -> Path:
    """A hundred images at most a folder are too many here: eight, of which 97% are 7 and 87% are 6."""
    root = tmp_path / "spawrious224"
    for folder, place, breed in itertools.product("01", PLACES, BREEDS):
        picture(root / folder / place / breed / "0.png")
        content = (root / folder / place / breed / "0.png").read_bytes()
        for number in range(1, 8):
            (root / folder / place / breed / f"{number}.png").write_bytes(content)
    return root


def shown(data: ImageDataset, environment: int) -> Counter[tuple[str, str, str]]:
    """Images by folder, place and breed."""
    return Counter(tuple(path.split("/")[:3]) for path in files(data, environment))  # type: ignore[misc]


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda each: each.name)
def test_spawrious_mixtures(mixture: Mixture, spawrious: Path) -> None:
    """Counted anew, from the description in the paper."""
    data = load(mixture.name, spawrious.parent)
    assert data.environments == ENVIRONMENTS
    assert DATASETS[mixture.name].report_envs == (0,)
    for e in range(3):
        begin, end = data.bounds[e : e + 2]
        names = [path.split("/")[2] for path in files(data, e)]
        assert [data.classes[label] for label in data.labels[begin:end]] == names
    assert len(set(data._feed.store.tree.paths)) == len(data.labels)  # no image is in two environments
    first, second = list(zip(BREEDS, mixture.train, strict=True)), list(zip(BREEDS, mixture.test, strict=True))
    if mixture.filler:
        for e, folder, own in ((1, "0", 7), (2, "1", 6)):
            expected = Counter({(folder, place, breed): own for breed, place in first})
            expected.update({(folder, mixture.filler, breed): 8 - own for breed in BREEDS})
            assert shown(data, e) == expected
        assert shown(data, 0) == Counter({(folder, place, breed): 8 for breed, place in second for folder in "01"})
    else:
        partner = {"bulldog": "dachshund", "dachshund": "bulldog", "labrador": "corgi", "corgi": "labrador"}
        assert shown(data, 1) == Counter({("0", place, breed): 8 for breed, place in first})
        assert shown(data, 2) == Counter({("0", place, partner[breed]): 8 for breed, place in first})
        both = {("0", place, dog): 8 for breed, place in second for dog in (breed, partner[breed])}
        assert shown(data, 0) == Counter(both)


def test_full_spawrious_has_the_published_counts() -> None:
    assert [int(share * 3168) for share in (0.97, 0.87)] == [3072, 2756]
    assert SOURCES["Spawrious"].counts["0/desert"] == 12_672


def test_a_place_that_is_missing_is_named(spawrious: Path) -> None:
    (spawrious / "1" / "snow").rename(spawrious / "1" / "Snow")
    with pytest.raises(SandmaskError, match=r"1/snow/corgi is missing"):
        load("SpawriousO2O_easy", spawrious.parent)
    checked = verify(SOURCES["Spawrious"], spawrious.parent)
    assert checked.status == "wrong"


@pytest.mark.parametrize(
    ("source", "fixture"), [("WILDSCamelyon", "camelyon"), ("WILDSFMoW", "fmow"), ("Spawrious", "spawrious")]
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_archives_are_put_in_place(
    source: str, fixture: str, wrapped: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Whether or not the archive has a folder around its content."""
    folder: Path = request.getfixturevalue(fixture)
    data_dir = tmp_path / "data"
    (data_dir / "downloads").mkdir(parents=True)
    known: Source = SOURCES[source]
    with tarfile.open(data_dir / "downloads" / known.files[0].name, "w:gz") as archive:
        archive.add(folder, arcname=folder.name if wrapped else ".")
    done = install(known, data_dir)
    assert done.path == data_dir / known.folder
    load(known.datasets[0], data_dir)
    assert isinstance(known.files[0], RemoteFile)


def test_sviro_is_a_folder_of_cars(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    cars = DATASETS["SVIRO"].environments
    make_folder(domains=cars, classes=[str(number) for number in range(7)], each=1, root=tmp_path / "sviro")
    data = load("SVIRO", tmp_path)
    assert (len(data.environments), len(data.classes), len(data.labels)) == (10, 7, 70)
    assert data.inputs(torch.tensor([0])).shape == (1, 3, 16, 16)
