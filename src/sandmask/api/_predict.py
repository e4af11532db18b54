"""`sandmask.predict`: classify files with a trained model."""

import math
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sandmask._arguments import PathLike, checked, paths
from sandmask.datasets._scan import SUFFIXES, list_files
from sandmask.datasets.manifest import listed_files, recognizes
from sandmask.errors import SandmaskError
from sandmask.training import TrainedRun, choose_device, load_run

if TYPE_CHECKING:
    import pandas as pd

ARRAYS = (".npy", ".npz", ".csv")
FILES_AT_ONCE = 64
_LARGE = 2**53  # float64 cannot represent every larger integer


@dataclass
class Predictions:
    """The examples of some files with their likeliest classes, and the files that could not be used.

    Each of `examples` is a dictionary with the file, the row if the file holds several examples, the likeliest class
    with its probability, and the `top` classes. `left_out` counts the files of other types in each folder.
    """

    examples: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


@checked
def predict(
    run: PathLike | TrainedRun,
    files: PathLike | Iterable[PathLike],
    *,
    top: int = 1,
    device: "str | torch.device | None" = None,
) -> "pd.DataFrame":
    """Classify files with a trained model; the dataset is not needed. For tensors and arrays, see `sandmask.load_run`.

        sandmask.predict("runs/pacs", ["photo.jpg", "drawings/"], top=3)

    :param run: a trained run: what `train` or `load_run` returned, its folder, or its model.safetensors.
    :param files: images; arrays as .npy, .npz or .csv; folders with them; or manifests, which list images.
    :param top: number of classes for each example, the likeliest first.
    :param device: "cpu", "cuda", "cuda:1"; a GPU if there is one. What `load_run` returned stays on its device.
    :return: a row for each example and class, with the columns file, row (missing if the file holds one example), rank
        (from 1), class and probability.
    """
    import pandas as pd

    if top < 1:
        raise SandmaskError(f"top should be at least 1. Found {top}.")
    if not isinstance(run, TrainedRun):
        run = load_run(run, choose_device(device))
    found = predict_files(run, paths(files), top)
    if found.failures:
        raise SandmaskError(" ".join(found.failures))
    rows = [
        (each["file"], each.get("row"), rank, ranked["class"], ranked["probability"])
        for each in found.examples
        for rank, ranked in enumerate(each["top"], start=1)
    ]
    frame = pd.DataFrame(rows, columns=["file", "row", "rank", "class", "probability"])
    return frame.astype({"row": "Int64"})


def predict_files(run: TrainedRun, files: Sequence[Path], top: int) -> Predictions:
    """Classify the files that can be used, and name the others."""
    found = Predictions()
    for examples in _batches(run, list(_expanded(run, files, found)), found.failures):
        found.examples += _ranked(run, examples, top)
    return found


def _expanded(run: TrainedRun, files: Sequence[Path], found: Predictions) -> Iterator[Path]:
    """The files. Folders and manifests are replaced by the files in them."""
    is_image = run.info.preprocessing.kind == "image"
    endings = SUFFIXES if is_image else ARRAYS
    for path in files:
        if path.is_dir():
            there = list_files(path).files
            taken = [name for name in there if name.lower().endswith(endings)]
            if not taken:
                found.failures.append(f"{path} holds no files of type {', '.join(endings)}.")
            elif len(taken) < len(there):
                found.left_out[str(path)] = len(there) - len(taken)
            yield from (path / name for name in taken)
        elif is_image and path.is_file() and recognizes(str(path)):
            try:
                yield from listed_files(path) or [path]
            except SandmaskError as error:
                found.failures.append(str(error))
        else:
            yield path


def _batches(run: TrainedRun, files: Sequence[Path], failures: list[str]) -> Iterator[list["Example"]]:
    """The examples of files, in batches of files; of all files at once for methods that use the whole batch."""

    def read(path: Path) -> list[Example] | SandmaskError:
        try:
            return read_examples(run, path)
        except SandmaskError as error:
            return error

    at_once = max(1, len(files)) if run.uses_context else FILES_AT_ONCE
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for begin in range(0, len(files), at_once):
            found: list[Example] = []
            for result in pool.map(read, files[begin : begin + at_once]):
                if isinstance(result, SandmaskError):
                    failures.append(str(result))
                else:
                    found += result
            if found:
                yield found


def _ranked(run: TrainedRun, examples: list["Example"], top: int) -> Iterator[dict[str, Any]]:
    probabilities = run.predict(torch.stack([example.x for example in examples]))
    values, numbers = probabilities.topk(min(top, len(run.classes)))
    for example, shares, classes in zip(examples, values.tolist(), numbers.tolist(), strict=True):
        ranked = [
            {"class": run.classes[number], "probability": share} for number, share in zip(classes, shares, strict=True)
        ]
        row = {} if example.row is None else {"row": example.row}
        yield {"file": example.file, **row, **ranked[0], "top": ranked}


@dataclass(frozen=True)
class Example:
    """One preprocessed example, and its file."""

    file: str
    row: int | None  # None if the file holds one example
    x: Tensor


def read_examples(run: TrainedRun, path: Path) -> list[Example]:
    """The preprocessed examples in a file; an error if there are none."""
    if not path.is_file():
        raise SandmaskError(f"There is no file {path}.")
    if path.suffix.lower() in ARRAYS:
        found = [each for name, array in _arrays(path) for each in _of_array(run, path, name, array)]
        if not found:
            raise SandmaskError(f"{path} holds no examples.")
        return found
    if run.info.preprocessing.kind != "image":
        raise SandmaskError(
            f"{path}: this model takes {run.info.preprocessing.expected}, in files of type {', '.join(ARRAYS)}."
        )
    return [Example(str(path), None, run.preprocess(path)[0])]


def _of_array(run: TrainedRun, path: Path, name: str, array: NDArray[Any]) -> Iterator[Example]:
    """The examples in an array: the array itself if it is one example, or its rows."""
    file = f"{path}:{name}" if name else str(path)
    shape = run.input_shape
    if path.suffix.lower() == ".csv" and array.shape[1:] == (math.prod(shape),):
        array = array.reshape(-1, *shape)
    is_image = run.info.preprocessing.kind == "image" and array.dtype == "uint8"
    is_one = array.shape == shape if not is_image else array.ndim < 4
    try:
        examples = run.preprocess(array[None] if is_one else array)
    except SandmaskError as error:
        raise SandmaskError(f"{file}: {error}") from error
    if not bool(examples.isfinite().all()):
        raise SandmaskError(f"{file} contains NaN or infinite values.")
    for row, x in enumerate(examples):
        yield Example(file, None if is_one else row, x)


def _arrays(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays of a file; those of an .npz file have names."""
    try:
        if path.suffix.lower() == ".csv":
            yield "", _read_csv(path)
        elif path.suffix.lower() == ".npy":
            yield "", np.load(path, allow_pickle=False)
        else:
            with np.load(path, allow_pickle=False) as archive:
                names = ["inputs"] if "inputs" in archive else list(archive)
                yield from ((name if len(names) > 1 else "", archive[name]) for name in names)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise SandmaskError(f"{path} cannot be read as {path.suffix[1:]}: {error}") from error


def _read_csv(path: Path) -> NDArray[Any]:
    """Read numbers, one example per line; a header line is skipped. They are integers if all are written so."""
    with path.open(encoding="utf-8-sig") as file:
        lines = [line for line in file if line.strip()]
    if lines and not any(map(_is_number, lines[0].split(","))):
        lines = lines[1:]
    if not lines:
        raise SandmaskError(f"{path} holds no examples.")
    numbers = np.loadtxt(lines, delimiter=",", ndmin=2)
    is_integer = all(re.fullmatch(r"[\s\d,+-]*", line) for line in lines) and bool((abs(numbers) < _LARGE).all())
    return numbers.astype(np.int64) if is_integer else numbers


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
