"""A user's own arrays in an .npz file."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sandmask
from sandmask.datasets import TensorDataset, dataset_entry, load_dataset
from sandmask.datasets.download import verify_own
from sandmask.errors import SandmaskError
from sandmask.training import split_environment

HOSPITALS = np.array(["south", "north", "west"] * 20)
DIAGNOSES = np.array([5, 3] * 30)
INPUTS = np.random.default_rng(0).normal(size=(60, 4))


def arrays(**changed: Any) -> dict[str, Any]:
    there = {"inputs": INPUTS, "class": DIAGNOSES, "domain": HOSPITALS, **changed}
    return {name: array for name, array in there.items() if array is not None}


def write(folder: Path, name: str = "patients.npz", **changed: Any) -> Path:
    np.savez(folder / name, **arrays(**changed))
    return folder / name


def test_examples_are_sorted_by_domain_and_otherwise_in_the_order_of_the_file(tmp_path: Path) -> None:
    dataset = load_dataset(write(tmp_path))
    assert (dataset.environments, dataset.classes) == (("north", "south", "west"), ("3", "5"))
    assert dataset.bounds == (0, 20, 40, 60)
    for number, domain in enumerate(dataset.environments):
        here = torch.arange(20 * number, 20 * number + 20)
        assert torch.equal(dataset.inputs(here), torch.tensor(INPUTS[domain == HOSPITALS], dtype=torch.float32))
        assert dataset.labels[here].tolist() == (DIAGNOSES[domain == HOSPITALS] == 5).tolist()


def test_the_name_depends_on_the_content_alone(tmp_path: Path) -> None:
    name = dataset_entry(write(tmp_path)).name
    assert name.startswith("patients-")
    (tmp_path / "copy").mkdir()
    np.savez_compressed(tmp_path / "copy" / "patients.npz", more=np.zeros(3), **arrays())
    assert dataset_entry(f"{tmp_path}/copy/patients.npz").name == name
    assert dataset_entry(write(tmp_path, inputs=INPUTS + 1)).name != name
    assert dataset_entry(write(tmp_path, inputs=INPUTS)).name == name


def test_arrays_may_have_other_names(tmp_path: Path) -> None:
    changed: dict[str, Any] = {"class": None, "diagnosis": DIAGNOSES, "domain": None, "site": HOSPITALS}
    file = write(tmp_path, **changed)
    dataset = load_dataset(f"{file}:class=diagnosis:domain=site")
    assert torch.equal(dataset.labels, load_dataset(write(tmp_path, "other.npz")).labels)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float64", "int32"])
def test_bytes_are_pixels_and_other_numbers_are_taken_as_they_are(tmp_path: Path, dtype: str) -> None:
    images = np.arange(60 * 1 * 2 * 2).reshape(60, 1, 2, 2).astype(dtype)
    dataset = load_dataset(write(tmp_path, inputs=images, domain=np.arange(60) // 20))
    assert isinstance(dataset, TensorDataset)
    found = dataset.inputs(torch.arange(60))
    assert dataset.environments == ("0", "1", "2")
    assert found.dtype == torch.float32
    assert torch.allclose(found, torch.tensor(images.astype("float32")) / (255 if dtype == "uint8" else 1))


def test_splits_are_those_of_the_file(tmp_path: Path) -> None:
    splits = np.where(np.arange(60) % 5 == 0, "VAL", "train")
    dataset = load_dataset(write(tmp_path, split=splits))
    assert dataset.splits is not None
    for env, domain in enumerate(dataset.environments):
        _, outside = split_environment(dataset, env, 0)
        expected = [number for number, word in enumerate(splits[domain == HOSPITALS]) if word == "VAL"]
        assert sorted((outside - dataset.bounds[env]).tolist()) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"domain": None}, r"has no array 'domain'\. Its arrays: inputs, class\. .* patients\.npz:domain=NAME"),
        (
            {"inputs": INPUTS[:, 0]},
            r"'inputs' should have numbers, of shape \[N, \.\.\.\]\. Found float64 of shape \[60\]",
        ),
        ({"inputs": INPUTS.astype(complex)}, r"'inputs' should have numbers"),
        ({"inputs": np.full((60, 2), np.nan)}, r"inputs contain NaN or inf"),
        ({"inputs": np.full((60, 2), 1e300)}, r"inputs contain NaN or inf"),
        ({"class": DIAGNOSES[:50]}, r"'class' has 50 rows, and 'inputs' has 60"),
        ({"class": DIAGNOSES / 2}, r"'class' should have one name or whole number for each example"),
        (
            {"class": DIAGNOSES.astype(object)},
            r"holds Python objects\. Save names as text: np\.array\(names, dtype=str\)",
        ),
        ({"domain": np.where(np.arange(60) == 7, "", HOSPITALS)}, r"row 7: no domain"),
        ({"split": np.array(["train", "test"] * 30)}, r"row 1: split should be train, val or empty. Found 'test'"),
        ({"split": np.array(["train"] * 60)}, r"all rows of the domain 'south' have the split train"),
        ({"split": np.arange(60)}, r"'split' should have \"train\", \"val\" or \"\""),
    ],
)
def test_mistakes_are_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SandmaskError, match=message):
        load_dataset(write(tmp_path, **changed))


def test_files_that_are_no_archives_are_named(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match=r"There is no file .*missing\.npz\. The file should have the arrays"):
        load_dataset(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(SandmaskError, match=r"text\.npz cannot be read as npz: it is not an archive of arrays"):
        load_dataset(tmp_path / "text.npz")
    cut = write(tmp_path)
    cut.write_bytes(cut.read_bytes()[:-200])
    with pytest.raises(SandmaskError, match=r"patients\.npz cannot be read as npz"):
        load_dataset(cut)
    assert verify_own(str(cut)).status == "wrong"


def test_damaged_and_other_members_are_named(tmp_path: Path) -> None:
    file = tmp_path / "patients.npz"
    np.savez_compressed(file, **arrays(inputs=np.zeros((60, 4000))))
    content = bytearray(file.read_bytes())
    content[100:140] = b"\xff" * 40
    file.write_bytes(content)
    with pytest.raises(SandmaskError, match=r"patients\.npz cannot be read as npz"):
        load_dataset(file)
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("inputs", "class", "domain"):
            archive.writestr(name, "text")
    with pytest.raises(SandmaskError, match=r"the array 'domain' should have one name or whole number"):
        load_dataset(file)


def test_a_run_on_arrays_predicts_the_same_file(tmp_path: Path) -> None:
    inputs = np.stack([DIAGNOSES - 4, DIAGNOSES * 0], axis=1) + 0.1 * INPUTS[:, :2]
    file = write(tmp_path, inputs=inputs)
    assert verify_own(str(file)).counts == {"north": 20, "south": 20, "west": 20}
    small = {"mlp_width": 8, "batch_size": 16}
    run = sandmask.train(file, "ERM", "west", steps=100, hparams=small, out=tmp_path / "run", progress=False)
    assert run.accuracy.loc["west", "in"] == 1
    found = sandmask.predict(run.folder, file)
    assert found["class"].tolist() == DIAGNOSES.astype(str).tolist()
    swept = sandmask.sweep(
        tmp_path / "sweep",
        str(file),
        "ERM",
        test_envs=["north"],
        n_hparams=1,
        n_trials=1,
        steps=20,
        hparams=small,
        progress=False,
    )
    assert "patients-" in str(swept.report())
