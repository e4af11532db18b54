"""Examples to predict, from files: images, and arrays as .npy, .npz or .csv."""

import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from sandmask.training import TrainedRun

ARRAYS = (".npy", ".npz", ".csv")


@dataclass(frozen=True)
class Example:
    """One preprocessed example, and where it is from."""

    file: str
    row: int | None  # its place in a file of several
    x: "Tensor"


def read_examples(run: "TrainedRun", path: Path) -> list[Example]:
    """The examples in a file, ready for the run's model; an error that names the file where there are none."""
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


def _of_array(run: "TrainedRun", path: Path, name: str, array: "NDArray[Any]") -> Iterator[Example]:
    """The examples in an array: it is one, or it holds one a row."""
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
        raise SandmaskError(f"{file} holds values that are no numbers (NaN or infinite).")
    for row, x in enumerate(examples):
        yield Example(file, None if is_one else row, x)


def _arrays(path: Path) -> Iterator[tuple[str, "NDArray[Any]"]]:
    """The arrays of a file; those of an .npz file have names."""
    import numpy as np

    try:
        if path.suffix.lower() == ".csv":
            yield "", _read_csv(path)
        elif path.suffix.lower() == ".npy":
            yield "", np.load(path, allow_pickle=False)
        else:
            with np.load(path, allow_pickle=False) as archive:
                yield from ((name if len(archive) > 1 else "", archive[name]) for name in archive)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise SandmaskError(f"{path} cannot be read as {path.suffix[1:]}: {error}") from error


def _read_csv(path: Path) -> "NDArray[Any]":
    """Numbers, one example a line; a first line of names is passed over."""
    import numpy as np

    with path.open(encoding="utf-8-sig") as file:
        lines = [line for line in file if line.strip()]
    if lines and not any(map(_is_number, lines[0].split(","))):
        lines = lines[1:]
    if not lines:
        raise SandmaskError(f"{path} holds no examples.")
    return np.loadtxt(lines, delimiter=",", ndmin=2)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
