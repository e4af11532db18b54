"""A user's own arrays in an .npz file, such as measurements or the features of a pretrained network.

    np.savez("patients.npz", inputs=inputs, **{"class": diagnoses, "domain": hospitals})

`inputs` has the shape [N, ...]; `class` and `domain` have N names or whole numbers. `split` is optional and has "train"
or "val", as in a manifest. If arrays have other names, these follow the file's name: `patients.npz:class=diagnosis`.
"""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sandmask.datasets._base import DatasetEntry, TensorDataset
from sandmask.datasets.image_sets import own_name
from sandmask.datasets.manifest import SPLITS, check_splits
from sandmask.errors import SandmaskError

SUFFIX = ".npz"
OPTIONS = ("inputs", "class", "domain", "split")
NEEDED = "The file should have the arrays `inputs`, `class` and `domain`, each with one row per example."


def recognizes(source: str) -> bool:
    """Whether this is the path of an .npz file, and not of a folder."""
    return source.lower().endswith(SUFFIX) and not os.path.isdir(source)  # noqa: PTH112 - never raises


def absolute(source: str) -> str:
    """Return the absolute path of a file."""
    return os.path.abspath(Path(source).expanduser())  # noqa: PTH100 - a link stays one


def entry_of(source: str, options: Mapping[str, str]) -> DatasetEntry:
    """Return a registry entry for the arrays of a file.

    The name of the entry is the name of the file and a hash of the arrays, such as `patients-3f2a9c51`.

    :param source: path of an .npz file.
    :param options: names of the arrays in the file, such as {"class": "diagnosis"}.
    """
    arrays = _Arrays.of(Path(source), options)
    return DatasetEntry(
        name=arrays.name(),
        description="Arrays",
        environments=arrays.names("domain")[0],
        load=lambda data_dir: arrays.load(),  # noqa: ARG005 - the file is not in the data folder
        network="mlp",
        scope="tabular",
        recipe_steps=1001,
        checkpoint_every=50,
    )


@dataclass(frozen=True)
class _Arrays:
    file: Path
    own: dict[str, str]  # the names in the file of the arrays that it has

    @classmethod
    def of(cls, file: Path, options: Mapping[str, str]) -> "_Arrays":
        file = file.expanduser()
        if not file.is_file():
            raise SandmaskError(f"There is no file {file}. {NEEDED}")
        with _opened(file) as archive:
            there = list(archive)
        own = {name: options.get(name, name) for name in OPTIONS}
        for name, given in own.items():
            if given not in there and (name != "split" or given != name):
                raise SandmaskError(
                    f"{file} has no array {given!r}. Its arrays: {', '.join(there) or 'none'}. {NEEDED} If the array "
                    f"has another name, say so: {file.name}:{name}=NAME"
                )
        return cls(file, {name: given for name, given in own.items() if given in there})

    def read(self, name: str) -> NDArray[Any]:
        """Return one of the arrays."""
        with _opened(self.file) as archive:
            return np.asarray(archive[self.own[name]])  # `archive` returns bytes if the member is not an array

    def inputs(self) -> NDArray[Any]:
        """Return the inputs [N, ...] as uint8 or float32."""
        array = self.read("inputs")
        if array.ndim < 2 or not len(array) or array.dtype.kind not in "fiub":
            raise self._error("inputs", "should have numbers, of shape [N, ...]", array)
        with np.errstate(over="ignore"):  # numbers too large for float32 become inf, which raises an error later
            return array if array.dtype == np.uint8 else array.astype(np.float32, copy=False)

    def names(self, name: str) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Return the different names in an array, in order, and for each row the index of its name [N]."""
        array = self.read(name)
        if array.ndim != 1 or array.dtype.kind not in "Uiub":
            raise self._error(name, "should have one name or whole number for each example, of shape [N]", array)
        found, numbers = np.unique(array, return_inverse=True)
        texts = tuple(map(str, found.tolist()))
        if "" in texts:
            raise SandmaskError(f"{self.file}, row {int(np.flatnonzero(array == '')[0])}: no {self.own[name]}.")
        return texts, numbers

    def load(self) -> TensorDataset:
        """Return the dataset."""
        inputs, (environments, domains), (classes, labels) = self.inputs(), self.names("domain"), self.names("class")
        for name, numbers in (("domain", domains), ("class", labels)):
            if len(numbers) != len(inputs):
                raise SandmaskError(
                    f"{self.file}: {self.own[name]!r} has {len(numbers):,} rows, and {self.own['inputs']!r} has "
                    f"{len(inputs):,}. {NEEDED}"
                )
        rows = [np.flatnonzero(domains == number) for number in range(len(environments))]
        parts = [(torch.from_numpy(inputs[some]), torch.from_numpy(labels[some])) for some in rows]
        dataset = TensorDataset(self.name(), environments, classes, parts)
        if "split" in self.own:
            splits = self._splits(len(inputs))
            check_splits(self.file, zip((environments[number] for number in domains), splits, strict=True))
            dataset.splits = torch.tensor(splits)[np.concatenate(rows)]
        return dataset

    def _splits(self, n: int) -> list[int]:
        array = self.read("split")
        if array.shape != (n,) or array.dtype.kind != "U":
            raise self._error("split", f'should have "train", "val" or "" for each example, of shape [{n}]', array)
        for row, word in enumerate(array.tolist()):
            if word.lower() not in SPLITS:
                raise SandmaskError(
                    f"{self.file}, row {row}: {self.own['split']} should be train, val or empty. Found {word!r}."
                )
        return [SPLITS[word.lower()] for word in array.tolist()]

    def name(self) -> str:
        """Return the file's name with a hash of the checksums of the arrays, which is the same for copies of a file."""
        with zipfile.ZipFile(self.file) as archive:
            found = {info.filename.removesuffix(".npy"): (info.CRC, info.file_size) for info in archive.infolist()}
        text = "".join(f"{name} {found[given]}\0" for name, given in sorted(self.own.items()))
        return own_name(self.file.stem, hashlib.sha256(text.encode()).hexdigest()[:8])

    def _error(self, name: str, should: str, array: NDArray[Any]) -> SandmaskError:
        found = f"{array.dtype} of shape {list(array.shape)}"
        return SandmaskError(f"{self.file}: the array {self.own[name]!r} {should}. Found {found}.")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open an .npz file. An error while it is read is raised as an error that names the file."""
    try:
        if not zipfile.is_zipfile(file):
            raise ValueError("it is not an archive of arrays from np.savez")
        with np.load(file, allow_pickle=False) as archive:
            yield archive
    except SandmaskError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).partition("\n")[0]
        if "allow_pickle" in reason:
            reason = "it holds Python objects. Save names as text: np.array(names, dtype=str)"
        raise SandmaskError(f"{file} cannot be read as npz: {reason}") from error
