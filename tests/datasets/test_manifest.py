"""A manifest: images listed in a CSV or Parquet file."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import pytest
import torch

from sandmask.datasets import ImageDataset, dataset_entry, load_dataset, take_inventory
from sandmask.errors import SandmaskError
from sandmask.training import split_environment

MakeFolder = Callable[..., Path]
HEADER = "path,class,domain"


def rows_of(root: Path) -> list[str]:
    """The lines of a manifest that says what the folders say, in an order of its own."""
    paths = sorted(root.rglob("*.png"), key=lambda path: (path.name, path))
    return [f"images/{path.relative_to(root)},{path.parts[-2]},{path.parts[-3]}" for path in paths]


def write(root: Path, rows: Sequence[str], header: str = HEADER, name: str = "scans.csv") -> Path:
    file = root.parent / name
    file.write_text("\n".join([header, *rows]) + "\n")
    return file


def load(file: Path | str) -> ImageDataset:
    dataset = load_dataset(file, image_size=24)
    assert isinstance(dataset, ImageDataset)
    return dataset


def test_a_manifest_is_the_folder_that_it_lists(make_folder: MakeFolder) -> None:
    root = make_folder()
    folder, listed = load(root), load(write(root, rows_of(root)))
    assert (listed.environments, listed.classes, listed.bounds) == (folder.environments, folder.classes, folder.bounds)
    numbers = torch.arange(12)
    assert torch.equal(listed.inputs(numbers), folder.inputs(numbers))
    assert torch.equal(listed.labels, folder.labels)
    assert take_inventory(listed).counts == take_inventory(folder).counts


def test_names_do_not_depend_on_the_place_the_order_or_the_format(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder()
    rows = rows_of(root)
    name = dataset_entry(write(root, rows)).name
    assert name.startswith("scans-")
    assert dataset_entry(write(root, rows[::-1])).name == name
    assert dataset_entry(write(root, [f"{tmp_path}/{row}" for row in rows])).name == name
    pd.read_csv(root.parent / "scans.csv").to_parquet(root.parent / "scans.parquet")
    assert dataset_entry(root.parent / "scans.parquet").name == name
    (tmp_path / "copy").mkdir()
    copy = shutil.copytree(root, tmp_path / "copy" / "images")
    assert dataset_entry(write(copy, rows)).name == name
    swapped = [rows[0].replace("art", "photo").replace("images/photo", "images/art"), *rows[1:]]
    assert dataset_entry(write(root, swapped)).name != name


def test_other_separators_columns_and_folders(make_folder: MakeFolder) -> None:
    root = make_folder()
    rows = [f"{row.removeprefix('images/')},7".replace(",", ";") for row in rows_of(root)]
    file = write(root, rows, "\ufefffile;diagnosis;site;age")
    data = load(f"{file}:path=file:class=diagnosis:domain=site:root=images")
    assert data.environments == ("art", "photo")
    assert data.classes == ("cat", "dog")


def test_two_spellings_of_a_letter_are_one_name(make_folder: MakeFolder) -> None:
    root = make_folder()
    rows = [row.replace(",cat", ",Löwe" if n % 2 else ",Lo\u0308we") for n, row in enumerate(rows_of(root))]
    assert load(write(root, rows)).classes == ("Löwe", "dog")


def test_rows_that_repeat_an_image_are_left_out(make_folder: MakeFolder) -> None:
    root = make_folder()
    rows = rows_of(root)
    data = load(write(root, [*rows, rows[0], "images/../" + rows[1]]))
    assert data.bounds == (0, 6, 12)
    assert [each.reason for each in data.left_out] == ["listed more than once"] * 2
    assert any("left out 2 (listed more than once)" in line for line in take_inventory(data).lines())


def test_a_given_split_is_kept_and_other_domains_are_split_at_random(make_folder: MakeFolder) -> None:
    root = make_folder(each=5)
    splits = {"0": "val", "1": "Val"}
    rows = [
        f"{row},{splits.get(Path(row.split(',')[0]).stem, 'train') if '/art' in row else ''}" for row in rows_of(root)
    ]
    data = load(write(root, rows, HEADER + ",split"))
    for trial in (0, 1):
        inside, outside = split_environment(data, 0, trial)
        assert outside.tolist() == [0, 1, 5, 6]
        assert inside.tolist() == [2, 3, 4, 7, 8, 9]
    other = load(root)
    assert torch.equal(split_environment(data, 1, 0)[1], split_environment(other, 1, 0)[1])
    assert dataset_entry(root.parent / "scans.csv").name != dataset_entry(write(root, rows_of(root))).name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [*rows, "images/none.png,cat,art"], r"row 14: .*images/none\.png does not exist"),
        (lambda rows: [rows[0].replace("/", "\\"), *rows], r"row 2: .*\.png does not exist; write / instead"),
        (lambda rows: [*rows, "images,cat,art"], r"row 14: .*images is not a file"),
        (lambda rows: [rows[0].replace("cat", " "), *rows[1:]], r"row 2: no class"),
        (lambda rows: [*rows[:2], rows[2].rpartition(",")[0] + ",", *rows[3:]], "row 4: no domain"),
        (lambda rows: [",cat,art", *rows], "row 2: no path"),
        (lambda rows: [*rows, "a,b"], "row 14: 2 cells, and the header has 3"),
        (lambda rows: [*rows, rows[3].rpartition(",")[0] + ",film"], r"row 14: .* is in row 5 with another"),
        (lambda rows: [], "lists no images"),
        (lambda rows: [row for row in rows if "art/cat" not in row], "class 'cat' is missing in the domain 'art'"),
    ],
)
def test_bad_rows_are_named(make_folder: MakeFolder, change: Callable[[list[str]], list[str]], message: str) -> None:
    root = make_folder()
    rows = rows_of(root)
    assert "cat" in rows[0]
    with pytest.raises(SandmaskError, match=message):
        load(write(root, change(rows)))


def test_bad_tables_are_explained_in_one_line(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder()
    with pytest.raises(SandmaskError, match=r"no column 'domain'. Its columns: path, class, hospital.*:domain=NAME"):
        load(write(root, rows_of(root), "path,class,hospital"))
    with pytest.raises(SandmaskError, match=r"scans\.csv has several columns 'class'"):
        load(write(root, [f"{row},other" for row in rows_of(root)], HEADER + ",class"))
    file = write(root, [f"{row},test" for row in rows_of(root)], HEADER + ",split")
    with pytest.raises(SandmaskError, match=r"row 2: split should be train, val or empty. Found 'test'"):
        load(file)
    file = write(root, [f"{row},train" for row in rows_of(root)], HEADER + ",split")
    with pytest.raises(SandmaskError, match="all rows of the domain 'art' have the split train"):
        load(file)
    with pytest.raises(SandmaskError, match=r"no option 'klass'. Did you mean 'class'"):
        load(f"{file}:klass=label")
    with pytest.raises(SandmaskError, match=r"There is no file none\.csv. A manifest has"):
        load("none.csv")
    for name, content, message in (
        ("bad.csv", b"path,class,domain\n\xff\xfe,a,b\n", "is not UTF-8 text"),
        ("open.csv", b'path,class,domain\n"x,a,b\n', "cannot be read as csv"),
        ("bad.parquet", b"PAR1 nothing", "cannot be read as parquet"),
        ("empty.csv", b"", "no column 'path'"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SandmaskError, match=message) as caught:
            load(tmp_path / name)
        assert "\n" not in str(caught.value)
