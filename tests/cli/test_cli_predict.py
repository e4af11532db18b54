"""`sandmask predict`, through the installed command."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from sandmask.cli._app import app
from sandmask.datasets import DATASETS, Dataset, dataset_entry, load_dataset
from sandmask.errors import SandmaskError
from sandmask.training import RunFolder, load_run, make_spec

CPU = torch.device("cpu")
Folders = Callable[[str], Path]


def predict(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["predict", *map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})


def answers(*arguments: object) -> Any:
    result = predict(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def train(folder: Path, dataset: Dataset, algorithm: str, **options: Any) -> Path:
    spec = make_spec(DATASETS[dataset.name], algorithm, [0], steps=4, hparams=options)
    RunFolder(folder).train(spec, dataset, CPU)
    return folder


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    return train(folder, load_dataset("DebugVector"), "ERM", batch_size=8, mlp_width=16)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    return train(folder, load_dataset("DebugVector"), "MTL", batch_size=8, mlp_width=16)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("digits"), load_dataset("Debug28"), "ERM", batch_size=2)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a generated folder of images, in `run`; the images are in `images`."""
    folder = tmp_path_factory.mktemp("photos")
    draws = np.random.RandomState(0)
    for domain in ("a", "b", "c"):
        for name in ("cat", "dog", "owl"):
            (folder / "images" / domain / name).mkdir(parents=True)
            for i in range(2):
                pixels = draws.randint(0, 256, (30, 40, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / "images" / domain / name / f"{i}.png")
    entry = dataset_entry(folder / "images")
    spec = make_spec(entry, "ERM", [0], steps=1, hparams={"batch_size": 2}, network="test_resnet", weights="none")
    RunFolder(folder / "run").train(spec, entry.load(image_size=32), CPU, weights="none")
    return folder


def test_images_of_any_format(photos: Path, tmp_path: Path) -> None:
    original = photos / "images" / "a" / "dog" / "1.png"
    files = [original]
    for name in ("x.bmp", "x.webp", "x.gif", "x.jpg", "x.tiff"):
        Image.open(original).save(tmp_path / name)
        files.append(tmp_path / name)
    probabilities = load_run(photos / "run").predict(files)
    found = answers(photos / "run", *files)
    assert [each["file"] for each in found] == [str(file) for file in files]
    for each, expected in zip(found, probabilities, strict=True):
        assert each["class"] == ("cat", "dog", "owl")[expected.argmax()]
        assert each["probability"] == pytest.approx(float(expected.max()), rel=1e-5)
    assert found[1]["probability"] == pytest.approx(found[0]["probability"], rel=1e-5)  # .bmp loses nothing


def test_the_table(photos: Path) -> None:
    files = sorted((photos / "images" / "b").rglob("*.png"))
    result = predict(photos / "run", *files, "--top", 2)
    assert (result.exit_code, result.stderr) == (0, "")
    heading, _, *lines = [line.strip().rsplit(maxsplit=2) for line in result.stdout.splitlines() if line.strip()]
    assert heading == ["file", "class", "probability"]
    for number, (file, expected) in enumerate(zip(files, load_run(photos / "run").predict(files), strict=True)):
        first, second = lines[2 * number : 2 * number + 2]
        values, classes = expected.topk(2)
        names = [("cat", "dog", "owl")[i] for i in classes]
        assert first == [str(file), names[0], f"{values[0]:.1%}"]
        assert second == [names[1], f"{values[1]:.1%}"]


def test_more_classes_than_there_are(photos: Path) -> None:
    (found,) = answers(photos / "run", photos / "images" / "a" / "cat" / "0.png", "--top", 9)
    assert {each["class"] for each in found["top"]} == {"cat", "dog", "owl"}
    assert sum(each["probability"] for each in found["top"]) == pytest.approx(1.0)
    assert found["top"][0] == {"class": found["class"], "probability": found["probability"]}


def test_more_files_than_are_read_at_once(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandmask.api._predict.FILES_AT_ONCE", 4)
    files = sorted((photos / "images").rglob("*.png"))
    found = answers(photos / "run", *files)
    assert [each["file"] for each in found] == [str(file) for file in files]
    assert [each["class"] for each in found] == load_run(photos / "run").classify(files)


def test_uint8_arrays_are_images_and_floats_are_preprocessed(photos: Path, tmp_path: Path) -> None:
    file = photos / "images" / "a" / "cat" / "1.png"
    np.save(tmp_path / "pixels.npy", np.asarray(Image.open(file)))
    np.save(tmp_path / "several.npy", np.stack([np.asarray(Image.open(file))] * 2))
    np.save(tmp_path / "ready.npy", load_run(photos / "run").preprocess(file)[0].numpy())
    names = ("pixels.npy", "several.npy", "ready.npy")
    found = answers(photos / "run", file, *(tmp_path / name for name in names))
    assert [each.get("row") for each in found] == [None, None, 0, 1, None]
    for each in found:
        assert each["probability"] == pytest.approx(found[0]["probability"], rel=1e-5)


def test_files_of_vectors(vectors: Path, tmp_path: Path) -> None:
    x = load_dataset("DebugVector").inputs(torch.arange(3)).numpy()
    np.save(tmp_path / "one.npy", x[0])
    np.save(tmp_path / "three.npy", x.astype(np.float64))
    np.savez(tmp_path / "single.npz", x)
    np.savez(tmp_path / "named.npz", first=x[:1], second=x[2])
    np.savetxt(tmp_path / "plain.csv", x, delimiter=",")
    np.savetxt(tmp_path / "titled.csv", x, delimiter=",", header="a,b,c,d,e,f,g,h", comments="")
    expected = load_run(vectors).predict(x).max(-1).values.tolist()
    wanted = {
        "one.npy": [0], "three.npy": [0, 1, 2], "single.npz": [0, 1, 2], "plain.csv": [0, 1, 2],
        "titled.csv": [0, 1, 2], "named.npz": [0, 2],
    }  # fmt: skip
    for name, rows in wanted.items():
        found = answers(vectors, tmp_path / name)
        assert [each["probability"] for each in found] == pytest.approx([expected[row] for row in rows], rel=1e-5)
    assert [each["file"] for each in found] == [f"{tmp_path}/named.npz:first", f"{tmp_path}/named.npz:second"]
    assert f"{tmp_path}/plain.csv[2]" in predict(vectors, tmp_path / "plain.csv").stdout


def test_files_of_small_images(digits: Path, tmp_path: Path) -> None:
    x = load_dataset("Debug28").inputs(torch.arange(2)).numpy()
    np.save(tmp_path / "x.npy", x)
    np.savetxt(tmp_path / "x.csv", x.reshape(2, -1), delimiter=",")
    expected = load_run(digits).predict(x).max(-1).values.tolist()
    for name in ("x.npy", "x.csv"):
        found = answers(digits, tmp_path / name)
        assert [each["probability"] for each in found] == pytest.approx(expected, rel=1e-5)


def test_integers_are_numbers_in_any_file(vectors: Path, tmp_path: Path) -> None:
    x = np.arange(16).reshape(2, 8) % 5
    np.save(tmp_path / "x.npy", x)
    np.savetxt(tmp_path / "x.csv", x, delimiter=",", fmt="%d")
    expected = load_run(vectors).predict(x.astype(np.float32)).max(-1).values.tolist()
    for name in ("x.npy", "x.csv"):
        assert [each["probability"] for each in answers(vectors, tmp_path / name)] == pytest.approx(expected)
    (tmp_path / "large.csv").write_text("99999999999999999999,1,2,3,4,5,6,7\n")
    assert len(answers(vectors, tmp_path / "large.csv")) == 1


def test_all_files_are_one_environment_for_a_method_with_context(
    context: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandmask.api._predict.FILES_AT_ONCE", 2)
    x = load_dataset("DebugVector").inputs(torch.arange(5)).numpy()
    for row in range(5):
        np.save(tmp_path / f"{row}.npy", x[row])
    found = answers(context, *(tmp_path / f"{row}.npy" for row in range(5)))
    expected = load_run(context).predict(x).max(-1).values.tolist()
    assert [each["probability"] for each in found] == pytest.approx(expected, rel=1e-5)


BAD_FILES: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing.npy", lambda path: None, "There is no file"),
    ("folder", lambda path: path.mkdir(), "holds no files of type .npy, .npz, .csv"),
    ("text.npy", lambda path: path.write_text("hello"), "cannot be read as npy"),
    ("text.npz", lambda path: path.write_text("hello"), "cannot be read as npz"),
    ("objects.npy", lambda path: np.save(path, np.array([{}])), "cannot be read as npy"),
    ("empty.csv", lambda path: path.write_text(""), "holds no examples"),
    ("words.csv", lambda path: path.write_text("1,2\nx,y\n"), "cannot be read as csv"),
    ("gap.csv", lambda path: path.write_text("1,,3,4,5,6,7,8\n1,2,3,4,5,6,7,8\n"), "cannot be read as csv"),
    ("latin.csv", lambda path: path.write_bytes(b"\xff\xfe\xff"), "cannot be read as csv"),
    ("nan.csv", lambda path: path.write_text("1,2,3,4,5,6,7,nan\n"), "contains NaN or infinite"),
    ("large.npy", lambda path: np.save(path, np.full(8, 1e300)), "contains NaN or infinite"),
    ("short.npy", lambda path: np.save(path, np.zeros(7)), "of shape [8]"),
    ("bytes.npy", lambda path: np.save(path, np.zeros(8, dtype=np.uint8)), "Found uint8"),
    ("photo.png", lambda path: Image.new("RGB", (4, 4)).save(path), "in files of type .npy, .npz, .csv"),
]


@pytest.mark.parametrize(("name", "make", "message"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES])
def test_bad_files_are_named_and_the_others_classified(
    name: str, make: Callable[[Path], object], message: str, vectors: Path, tmp_path: Path
) -> None:
    make(tmp_path / name)
    np.save(tmp_path / "good.npy", np.zeros(8, dtype=np.float32))
    result = predict(vectors, tmp_path / name, tmp_path / "good.npy")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path / name) in line
    assert message in line
    assert "good.npy" in result.stdout


def test_images_that_cannot_be_read_are_all_named(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "cut.png").write_bytes((photos / "images/a/cat/0.png").read_bytes()[:200])
    result = predict(photos / "run", tmp_path / "text.jpg", tmp_path / "cut.png", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (2, [])
    first, second = result.stderr.splitlines()
    assert "text.jpg cannot be decoded as an image" in first
    assert "cut.png cannot be decoded as an image" in second


def test_a_model_file_will_do(photos: Path, tmp_path: Path) -> None:
    image = photos / "images" / "a" / "cat" / "0.png"
    expected = answers(photos / "run", image)
    assert answers(photos / "run" / "model.safetensors", image) == expected
    renamed = tmp_path / "cats and dogs.safetensors"
    renamed.write_bytes((photos / "run" / "model.safetensors").read_bytes())
    assert answers(renamed, image) == expected
    with pytest.raises(SandmaskError, match=r"no records\.jsonl in the folder of the model"):
        load_run(renamed).record()
    assert load_run(photos / "run" / "model.safetensors").record().status == "done"


def test_a_file_that_is_no_model(photos: Path) -> None:
    image = photos / "images" / "a" / "cat" / "0.png"
    result = predict(image, image)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert f"{image} cannot be read as a model file" in result.stderr
    assert "Delete" not in result.stderr


def test_a_folder_stands_for_its_images(photos: Path, tmp_path: Path) -> None:
    files = sorted((photos / "images" / "a").rglob("*.png"))
    shutil.copytree(photos / "images" / "a", tmp_path / "a")
    (tmp_path / "a" / "cat" / "labels.csv").write_text("1,2\n")
    (tmp_path / "a" / "cat" / "loop").symlink_to(tmp_path / "a")
    result = predict(photos / "run", tmp_path / "a", files[0], "--json")
    found = json.loads(result.stdout)
    copies = [str(tmp_path / file.relative_to(photos / "images")) for file in files]
    assert [each["file"] for each in found] == [*copies, str(files[0])]
    assert [each["class"] for each in found[:-1]] == load_run(photos / "run").classify(files)
    assert result.exit_code == 0
    assert result.stderr == f"note: left out 1 file of other types in {tmp_path / 'a'}\n"


def test_a_folder_stands_for_its_arrays(vectors: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("x.npy", "in/y.npy"):
        np.save(tmp_path / name, np.zeros(8, dtype=np.float32))
    assert [each["file"] for each in answers(vectors, tmp_path)] == [f"{tmp_path}/in/y.npy", f"{tmp_path}/x.npy"]


def test_mistakes_about_the_run_are_told(vectors: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(8))
    nowhere = predict(tmp_path / "nowhere", tmp_path / "x.npy")
    assert (nowhere.exit_code, "There is no" in nowhere.stderr) == (2, True)
    device = predict(vectors, tmp_path / "x.npy", "--device", "abacus")
    assert (device.exit_code, "'abacus' cannot be used here" in device.stderr) == (2, True)
    assert predict(vectors).exit_code == 2
    assert predict(vectors, tmp_path / "x.npy", "--top", 0).exit_code == 2
