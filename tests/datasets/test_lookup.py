import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sandmask
from sandmask.datasets import (
    DATASETS,
    TensorDataset,
    absolute,
    data_folder,
    dataset_entry,
    double_meaning,
    load_dataset,
    resolve_environment,
)
from sandmask.errors import SandmaskError


def test_registration_order() -> None:
    paper = [
        "Spirals",
        "ColoredMNIST",
        "RotatedMNIST",
        "VLCS",
        "PACS",
        "OfficeHome",
        "TerraIncognita",
        "DomainNet",
    ]
    assert list(DATASETS)[:8] == paper
    assert "Debug28" in DATASETS


@pytest.mark.parametrize(
    ("dataset", "text", "number"),
    [
        ("PACS", "S", 3),
        ("PACS", "s", 3),
        ("PACS", "sketch", 3),
        ("PACS", "Art-Painting", 0),
        ("PACS", "2", 2),
        ("PACS", 2, 2),
        ("OfficeHome", "real_world", 3),
        ("TerraIncognita", "l38", 1),
        ("TerraIncognita", "location_38", 1),
        ("ColoredMNIST", "-90%", 2),
        ("ColoredMNIST", "-90", 2),
        ("ColoredMNIST", "+90", 0),
        ("RotatedMNIST", "15", 1),  # a name goes before a number
        ("RotatedMNIST", "5", 5),
        ("Spirals", "16", 16),
        ("DomainNet", "clipart", 0),
        ("DomainNet", "clip", 0),
    ],
)
def test_environments_by_name_or_number(dataset: str, text: str | int, number: int) -> None:
    assert resolve_environment(DATASETS[dataset], text) == number


def test_an_unknown_environment_gets_a_suggestion() -> None:
    with pytest.raises(SandmaskError, match=r"no environment 'skech'.*Did you mean 'sketch'\?.*0 to 3"):
        resolve_environment(DATASETS["PACS"], "skech")
    with pytest.raises(SandmaskError, match="no environment '4'"):
        resolve_environment(DATASETS["PACS"], 4)
    with pytest.raises(SandmaskError, match="no environment '-1'"):
        resolve_environment(load_dataset("DebugVector"), "-1")
    with pytest.raises(SandmaskError, match=r"has no environment '0,1'\. Name several .*: --test-env 0 --test-env 1"):
        resolve_environment(DATASETS["Spirals"], "0,1")
    with pytest.raises(SandmaskError, match=r"Spirals has no environment '17'\. Its environments are 0 to 16\.$"):
        resolve_environment(DATASETS["Spirals"], "17")


def test_unknown_names_and_options() -> None:
    with pytest.raises(SandmaskError, match="Unknown dataset ''"):
        load_dataset("")
    with pytest.raises(SandmaskError, match="Did you mean 'Spirals'"):
        load_dataset("Spiral")
    with pytest.raises(SandmaskError, match=r"Spirals has no option 'nois'. Did you mean 'noise'"):
        load_dataset("Spirals", nois=0.1)
    with pytest.raises(SandmaskError, match=r"has no option 'noise'\. It has none"):
        load_dataset("DebugVector", noise=0.1)


def test_a_folder_is_a_dataset(make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_folder(("b", "a", "c"))
    data = load_dataset(str(root), image_size=16)
    assert data.environments == ("a", "b", "c")
    assert data.classes == ("cat", "dog")
    assert re.fullmatch(r"images-[0-9a-f]{8}", data.name)
    entry = dataset_entry(root)
    assert (entry.environments, entry.scope, entry.network) == (("a", "b", "c"), "image", "resnet50.tv_in1k")
    assert resolve_environment(entry, "C") == 2
    monkeypatch.chdir(root.parent)
    assert dataset_entry("images").name == dataset_entry("./images").name == data.name


def test_a_copied_folder_is_the_same_dataset(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    root = make_folder()
    (root / "notes.txt").write_text("not an image, so it does not count")
    shutil.copytree(root, tmp_path / "elsewhere" / "images")
    name = dataset_entry(root).name
    assert dataset_entry(tmp_path / "elsewhere" / "images").name == name
    assert str(tmp_path) not in name


@pytest.mark.parametrize("change", ["content", "name", "one image less"])
def test_different_folders_of_one_name_are_different_datasets(
    make_folder: Callable[..., Path], tmp_path: Path, change: str
) -> None:
    root = make_folder(suffix=".bmp")  # files of one size, whatever they show
    other = tmp_path / "elsewhere" / "images"
    shutil.copytree(root, other)
    path = other / "art" / "cat" / "0.bmp"
    if change == "content":
        path.write_bytes(path.read_bytes()[::-1])
    elif change == "name":
        path.rename(path.with_name("9.bmp"))
    else:
        path.unlink()
    assert dataset_entry(other).name != dataset_entry(root).name


def test_environments_that_differ_in_case_or_spaces(make_folder: Callable[..., Path]) -> None:
    entry = dataset_entry(make_folder(("Camera A", "camera a", "camera_b")))
    assert [resolve_environment(entry, name) for name in ("Camera A", "camera a", "Camera B", "2")] == [0, 1, 2, 2]
    with pytest.raises(SandmaskError, match="several environments like 'camera_a': 'Camera A', 'camera a'"):
        resolve_environment(entry, "camera_a")


def test_a_name_holds_nothing_that_acts_on_a_terminal(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    name = dataset_entry(make_folder(root=tmp_path / "my\x1b[2J\nphotos")).name
    assert name.startswith("my_[2J_photos-")


def test_a_dataset_goes_before_a_folder_of_its_name(
    make_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(root=tmp_path / "Spirals")
    monkeypatch.chdir(tmp_path)
    assert dataset_entry("Spirals") is DATASETS["Spirals"]
    assert dataset_entry("./Spirals").scope == "image"


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match=r"There is no folder .*/nothing"):
        load_dataset(tmp_path / "nothing")


def test_where_data_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SANDMASK_DATA", raising=False)
    assert data_folder() == tmp_path / "home" / ".cache" / "sandmask" / "data"
    (tmp_path / "data").mkdir()
    assert data_folder() == Path("data")
    monkeypatch.setenv("SANDMASK_DATA", "~/sets")
    assert data_folder() == tmp_path / "home" / "sets"
    assert data_folder("here") == Path("here")


def test_the_documented_dataset_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-dataset.md").read_text(encoding="utf-8")
    block = next(text.split("```")[0] for text in page.split("```python\n")[1:] if "DATASETS.register" in text)
    try:
        exec(block, {"__name__": "documented"})
        data = load_dataset("Shifted")
        assert data.environments == DATASETS["Shifted"].environments == ("low", "middle", "high", "none")
        assert data.bounds == (0, 200, 400, 600, 800)
    finally:
        DATASETS._entries.pop("shifted", None)


def test_what_is_no_dataset_is_named() -> None:
    entry = replace(DATASETS["DebugVector"], name="Mine", load=lambda _: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(SandmaskError, match=r"`load` of Mine should return a `Dataset`\. Found NoneType"):
        load_dataset(entry)


def test_a_number_that_is_another_environments_name_is_an_error() -> None:
    """A loop over range(3) would otherwise hold out the first of "1", "2" and "3" twice, and the last never."""
    entry = replace(DATASETS["DebugVector"], name="Years", environments=("1", "2", "3"))
    assert [resolve_environment(entry, name) for name in ("1", "2", "3", 0, 3)] == [0, 1, 2, 0, 2]
    with pytest.raises(SandmaskError, match=r"an environment '1', and '2' is its environment number 1.*as a string"):
        resolve_environment(entry, 1)
    same = replace(entry, environments=("0", "1", "5"))
    assert [resolve_environment(same, number) for number in (0, 1, 2, 5)] == [0, 1, 2, 2]


def test_a_word_that_is_a_name_and_another_environments_number_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = DATASETS["DebugVector"]
    entry = replace(plain, name="Years", environments=("1", "2", "3"), load=years)
    note = "'1' is read as a name: '1' is environment number 0 of Years, and number 1 is '2'."
    assert double_meaning(entry, "1") == note
    assert [double_meaning(entry, word) for word in ("0", "3", 0, 3)] == [None] * 4
    assert [double_meaning(DATASETS["RotatedMNIST"], word) for word in ("0", "15", "1")] == [None] * 3
    monkeypatch.setitem(DATASETS._entries, "years", entry)
    sandmask.train("Years", "ERM", "1", steps=1, hparams={"batch_size": 4}, out=tmp_path / "run", progress=False)
    assert capsys.readouterr().err == f"note: {note}\n"
    assert (
        note in sandmask.plan_sweep(tmp_path, datasets="Years", algorithms="ERM", test_envs="1", calibrate=False).notes
    )


@pytest.mark.parametrize("name", ["images", "scans.csv", "patients.npz"])
def test_paths_in_the_home_folder_have_absolute_names(
    name: str, make_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep stores absolute names. In `PACS,~/scans.csv`, the shell leaves the `~` to us."""
    rows = [f"{path},{path.parts[-2]},{path.parts[-3]}" for path in make_folder().rglob("*.png")]
    (tmp_path / "scans.csv").write_text("\n".join(["path,class,domain", *rows]))
    numbers = np.arange(8)
    arrays: dict[str, Any] = {"inputs": numbers[:, None], "class": numbers % 2, "domain": numbers // 4}
    np.savez(tmp_path / "patients.npz", **arrays)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert absolute(f"~/{name}") == str(tmp_path / name)


def years(data_dir: Path | None) -> TensorDataset:
    data = load_dataset("DebugVector", data_dir)
    parts = [(data.inputs(rows), data.labels[rows]) for rows in map(torch.arange, data.bounds[:-1], data.bounds[1:])]
    return TensorDataset("Years", ("1", "2", "3"), data.classes, parts)
