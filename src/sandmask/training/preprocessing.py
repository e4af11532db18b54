"""Preprocessing of a user's examples (files, images, arrays), the same as in evaluation during training."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sandmask.datasets import CorruptImageError, Dataset, ImageDataset, TensorDataset
from sandmask.datasets._decode import UnsupportedPixelsError, decode, rgb_pixels, squeeze
from sandmask.datasets._images import evaluated, normalized
from sandmask.errors import SandmaskError

InputKind = Literal["image", "pixels", "numbers"]


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of an example. It depends on the kind of data on which the model was trained.

    - "image": image files, which are squeezed to `storage_size`, resized to `input_shape` and normalized;
    - "pixels": arrays of bytes, which are divided by 255;
    - "numbers": arrays, which are not changed.
    """

    input_shape: tuple[int, ...]
    kind: InputKind
    storage_size: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @classmethod
    def of(cls, dataset: Dataset) -> "Preprocessing":
        """The preprocessing that is used to evaluate on a dataset."""
        if isinstance(dataset, ImageDataset):
            mean, std = (tuple(each.tolist()) for each in dataset.normalization)
            return cls(dataset.input_shape, "image", dataset.storage_size, mean, std)
        is_pixels = isinstance(dataset, TensorDataset) and dataset.stored.dtype == torch.uint8
        return cls(dataset.input_shape, "pixels" if is_pixels else "numbers")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Preprocessing":
        """Create it from its fields as JSON values."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**fields)

    @property
    def expected(self) -> str:
        """A description of a valid example."""
        shape = list(self.input_shape)
        if self.kind == "image":
            return f"images (files, uint8 arrays or PIL images) or preprocessed float arrays of shape {shape}"
        return f"{'float or uint8' if self.kind == 'pixels' else 'float or integer'} arrays of shape {shape}"

    def __call__(self, x: Any, device: torch.device) -> Tensor:
        """Convert any input of `TrainedRun.predict` to float32 examples `[N, *input_shape]` on `device`."""
        if isinstance(x, str | os.PathLike) or _is_picture(x):
            x = [x]
        if isinstance(x, np.ndarray | Tensor) and not (self.kind == "image" and _is_uint8(x)):
            return self._array(x, leading=1).to(device)
        if not isinstance(x, Iterable):
            raise SandmaskError(f"This model takes {self.expected}. Found {type(x).__name__}.")
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # decoding runs outside Python's lock
            examples = list(pool.map(lambda item: self._one(item, device), x))
        return torch.stack(examples) if examples else torch.empty(0, *self.input_shape, device=device)

    def _one(self, item: Any, device: torch.device) -> Tensor:
        """One example `[*input_shape]`, float32."""
        if self.kind != "image" or (isinstance(item, np.ndarray | Tensor) and not _is_uint8(item)):
            return self._array(item).to(device)
        # As in training, images are squeezed on the CPU. The rest runs on the device.
        pixels = squeeze(self._pixels(item).cpu(), self.storage_size).to(device)
        image = evaluated(pixels.permute(1, 2, 0)[None], self.input_shape[-1])[0]
        return normalized(image, torch.tensor(self.mean, device=device), torch.tensor(self.std, device=device))

    def _array(self, array: Any, leading: int = 0) -> Tensor:
        """Preprocessed examples, with `leading` dimensions before those of an example."""
        if not isinstance(array, np.ndarray | Tensor):
            raise SandmaskError(f"This model takes {self.expected}. Found {type(array).__name__}.")
        if tuple(array.shape[leading:]) != self.input_shape or array.ndim != leading + len(self.input_shape):
            sizes = ", ".join(map(str, self.input_shape))
            batch = f", in a batch of shape [N, {sizes}]" if leading else ""
            raise SandmaskError(f"This model takes {self.expected}{batch}. Found the shape {list(array.shape)}.")
        if _is_uint8(array) and self.kind == "pixels":
            return (torch.tensor(array) if isinstance(array, np.ndarray) else array) / 255.0
        is_float = array.is_floating_point() if isinstance(array, Tensor) else array.dtype.kind == "f"
        if not is_float and not (self.kind == "numbers" and _is_integer(array)):
            raise SandmaskError(
                f"This model takes {self.expected}. Found {array.dtype}. Convert preprocessed inputs to float32"
                + ("." if self.kind == "numbers" else ", and pixels from 0 to 255 to uint8.")
            )
        if isinstance(array, Tensor):
            return array.to(torch.float32)
        with np.errstate(over="ignore"):  # values too large for float32 become inf, for which callers check
            return torch.tensor(array.astype(np.float32))  # a copy, because the array may be read-only

    def _pixels(self, item: Any) -> Tensor:
        """The pixels [3, height, width] of a file, a picture or a uint8 array, before any resizing."""
        if isinstance(item, str | os.PathLike) or _is_picture(item):
            return _decoded(item)
        if isinstance(item, Tensor):
            planes = item[None] if item.ndim == 2 else item
        else:
            array = np.array(item)
            if array.dtype != np.uint8:
                raise SandmaskError(f"This model takes {self.expected}. Found {type(item).__name__}.")
            planes = torch.from_numpy(array[..., None] if array.ndim == 2 else array)
            planes = planes.permute(2, 0, 1) if planes.ndim == 3 else planes
        if planes.ndim != 3 or planes.shape[0] not in (1, 3) or 0 in planes.shape:
            raise SandmaskError(
                "Images should have the shape [height, width, 3] or [height, width] as uint8 arrays, and "
                f"[3, height, width] as uint8 tensors. Found {list(item.shape)}."
            )
        return planes.expand(3, -1, -1)


def _decoded(item: Any) -> Tensor:
    """The pixels of a file or a PIL image."""
    try:
        return rgb_pixels(item) if _is_picture(item) else decode(Path(item)).pixels.permute(2, 0, 1)
    except CorruptImageError as error:
        raise SandmaskError(f"{Path(item)} cannot be decoded as an image ({error.reason}).") from error
    except UnsupportedPixelsError as error:
        raise SandmaskError(f"This PIL image cannot be used: {error}.") from error


def _is_uint8(array: Any) -> bool:
    return array.dtype in (np.uint8, torch.uint8)


def _is_integer(array: Any) -> bool:
    """Whether an array holds integers other than bytes. Bytes may be pixels, which have to be scaled."""
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "iu" and not _is_uint8(array)
    return array.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)


def _is_picture(item: Any) -> bool:
    """Whether an item is a PIL image. PIL is not imported for this."""
    return hasattr(item, "convert") and hasattr(item, "getbands")
