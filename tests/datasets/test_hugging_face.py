"""Hugging Face datasets, with the real package on small local ones."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sandmask.datasets import ImageDataset, absolute, dataset_entry, load_dataset, take_inventory
from sandmask.errors import SandmaskError

hub = pytest.importorskip("datasets")

MakeFolder = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def rows_of(root: Path) -> Any:
    """The images of a folder as rows, from the last to the first, with their files' bytes."""
    paths = sorted(root.rglob("*.png"), reverse=True)
    columns = {
        "image": [{"bytes": path.read_bytes(), "path": None} for path in paths],
        "label": [path.parts[-2] for path in paths],
        "domain": [path.parts[-3] for path in paths],
    }
    features = hub.Features(
        {"image": hub.Image(), "label": hub.ClassLabel(names=["dog", "cat", "bird"]), "domain": hub.Value("string")}
    )
    return hub.Dataset.from_dict(columns, features)


def load(source: str | Path) -> ImageDataset:
    dataset = load_dataset(source, image_size=24)
    assert isinstance(dataset, ImageDataset)
    return dataset


def test_a_saved_dataset_is_the_folder_that_it_was_made_of(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder()
    rows_of(root).save_to_disk(tmp_path / "saved")
    folder, data = load(root), load(tmp_path / "saved")
    assert data.environments == ("art", "photo")
    assert data.classes == ("dog", "cat")  # the order of the ClassLabel, without what is not there
    backwards = [5, 4, 3, 2, 1, 0, 11, 10, 9, 8, 7, 6]  # domain by domain, rows in their order
    assert torch.equal(data.inputs(torch.arange(12)), folder.inputs(torch.tensor(backwards)))
    assert [data.classes[n] for n in data.labels] == [folder.classes[n] for n in folder.labels[backwards]]
    data.check()
    again = pickle.loads(pickle.dumps(data._feed.store))
    assert torch.equal(again.start(torch.tensor([3])).result().pixels, data._feed.fetch(torch.tensor([3])).pixels)


def test_names_do_not_depend_on_the_format_or_the_place(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder()
    rows = rows_of(root)
    (tmp_path / "parquet").mkdir()
    rows.save_to_disk(tmp_path / "scans")
    rows.to_parquet(tmp_path / "scans.parquet")
    rows.to_parquet(tmp_path / "parquet" / "scans.parquet")
    hub.DatasetDict(only=rows).save_to_disk(tmp_path / "parquet" / "scans")
    sources = [f"hf:{tmp_path}/{name}" for name in ("scans", "scans.parquet", "parquet/scans.parquet", "parquet/scans")]
    assert len({dataset_entry(source).name for source in sources}) == 1
    other = rows.map(lambda row: {"domain": row["domain"].upper()})
    other.save_to_disk(tmp_path / "other" / "scans")
    assert dataset_entry(tmp_path / "other" / "scans").name != dataset_entry(sources[0]).name


def test_columns_and_splits(make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(make_folder()).rename_columns({"label": "diagnosis", "domain": "site"})
    hub.DatasetDict(train=rows.select(range(6)), test=rows.select(range(6, 12))).save_to_disk(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SandmaskError, match="hf: lacks a name"):
        load("hf:")
    with pytest.raises(SandmaskError, match=r"several splits: train, test. Choose one with hf:saved:split=train"):
        load("hf:saved")
    with pytest.raises(SandmaskError, match=r"no column 'label'. Its columns: image, diagnosis, site\..*:label=COLUMN"):
        load("hf:saved:split=train")
    data = load("hf:saved:split=train+test+train:label=diagnosis:domain=site")
    assert take_inventory(data).counts == ((3, 3), (3, 3))
    assert absolute("saved:split=train:label=diagnosis:domain=site").startswith(f"hf:{tmp_path}/saved:split=train:")
    with pytest.raises(SandmaskError, match=r"no split 'val'"):
        load("hf:saved:split=val")
    with pytest.raises(SandmaskError, match=r"no option 'lable'. Did you mean 'label'"):
        load("hf:saved:lable=diagnosis")


def test_numbers_and_missing_values(make_folder: MakeFolder, tmp_path: Path) -> None:
    rows = rows_of(make_folder()).remove_columns("domain")
    rows.add_column("domain", [10, 9] * 6).save_to_disk(tmp_path / "numbers")
    assert load(tmp_path / "numbers").environments == ("9", "10")
    rows.add_column("domain", ["a", "b", None] * 4).save_to_disk(tmp_path / "holes")
    rows.add_column("domain", ["a", "b", ""] * 4).save_to_disk(tmp_path / "blanks")
    for name in ("holes", "blanks"):
        with pytest.raises(SandmaskError, match="row 2: no domain"):
            load(tmp_path / name)
    rows.select([]).save_to_disk(tmp_path / "nothing", num_shards=1)  # older versions cannot count shards of nothing
    with pytest.raises(SandmaskError, match="nothing has no rows"):
        load(tmp_path / "nothing")
    rows.add_column("domain", ["a", "b"] * 6).remove_columns("image").add_column("image", [0.5] * 12).save_to_disk(
        tmp_path / "floats"
    )
    with pytest.raises(SandmaskError, match="column 'image' does not hold images"):
        load(tmp_path / "floats")


def test_a_corrupt_image_is_named_by_its_row(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder()
    (root / "photo" / "dog" / "0.png").write_bytes(b"no image")
    rows_of(root).save_to_disk(tmp_path / "saved")
    with pytest.raises(SandmaskError, match="saved/row 2 cannot be decoded"):
        load(tmp_path / "saved").check()


def test_without_a_network_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SandmaskError, match=r"cannot be reached.*save_to_disk") as caught:
        load("hf:flwrlabs/pacs")
    assert "\n" not in str(caught.value)
    assert not hub.config.HF_HUB_OFFLINE


def test_what_is_not_a_dataset_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    for name in ("empty", "bad.parquet"):
        with pytest.raises(SandmaskError, match="cannot be loaded") as caught:
            load(f"hf:{tmp_path / name}")
        assert "\n" not in str(caught.value)
