"""Datasets of images, which are decoded by several threads, stored as uint8 and augmented on the device."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask._text import printable
from sandmask.datasets._augment import Augmentation, draws_of
from sandmask.datasets._base import Dataset
from sandmask.datasets._decode import common_size
from sandmask.datasets._store import CACHE_MODES, CacheMode, Feed, ImageStore, Stored
from sandmask.datasets._tree import ImageTree
from sandmask.errors import SandmaskError
from sandmask.functional.compiling import Compiled
from sandmask.registry import closest

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SHOWN_CORRUPT = 5  # number of images that an error names
READ_AHEAD = 4  # number of minibatches that are read while steps are computed

_log = logging.getLogger(__name__)


class ImageDataset(Dataset):
    """The images of an `ImageTree`.

    Images are stored as `storage_size` x `storage_size` pixels, to which they are resized when they are decoded,
    without keeping their aspect ratio. The default is the size of the images, if a sample of them are squares of the
    same size from `image_size` to 8/7 of it. Otherwise, it is 8/7 of `image_size` (256 for 224), so that crops have
    about as many pixels as the inputs of the network. Evaluation resizes the stored images to `image_size`.

    `cache` says where decoded images are kept: on the "device", in "memory", not at all ("none", which decodes them
    each time), or in the first of these places in which they fit ("auto"). `skip_corrupt` decodes all images when the
    dataset is created, and leaves out those that cannot be decoded, with a logged warning. `left_out` lists all files
    of the folder that are not used, and why.
    """

    def __init__(
        self,
        name: str,
        tree: ImageTree,
        *,
        environments: Sequence[str] = (),
        image_size: int = 224,
        storage_size: int | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        cache: CacheMode = "auto",
        workers: int | None = None,
        skip_corrupt: bool = False,
    ) -> None:
        _check_packages()
        _check_options(name, image_size, storage_size, cache, workers)
        self.name = name
        self.environments = tuple(environments) or tree.domains
        self.input_shape = (3, image_size, image_size)
        self.augmentation: Augmentation | None = Augmentation(size=image_size)
        store = ImageStore(tree, storage_size or _storage_size(tree, image_size), workers=workers, cache=cache)
        if skip_corrupt:
            store = _without_corrupt(name, store)
            tree = store.tree
        self._checked = skip_corrupt
        self._feed = Feed(store, torch.device("cpu"))
        self._compiled: Compiled | None = None
        self.left_out = tree.left_out
        self.labels = tree.labels
        self.bounds = tree.bounds
        self.splits = tree.splits
        self.classes = tree.classes
        self.domains = tree.domains
        self.normalization = _normalization(name, mean, std, torch.device("cpu"))

    @property
    def resident(self) -> bool:
        """Whether images are kept on the device."""
        return self._feed.place == "device"

    def inputs(self, indices: Tensor) -> Tensor:
        """Return images for evaluation: resized and normalized, but not augmented."""
        return self._evaluated(self._feed.fetch(indices), indices.shape)

    def training_inputs(self, indices: Tensor, key: Tensor) -> Tensor:
        """Return augmented and normalized images."""
        return self._trained_on(self._feed.fetch(indices), indices.shape, key)

    def batches(self, indices: Iterable[Tensor], depth: int = 4) -> Iterator[Tensor]:
        """Yield `inputs` of each element, and decode up to `depth` elements ahead."""
        requests = ((some, some.shape) for some in indices)
        for stored, shape in self._feed.fetch_ahead(requests, depth):
            yield self._evaluated(stored, shape)

    def training_batches(self, requests: Iterable[tuple[Tensor, Tensor]], depth: int = 4) -> Iterator[Tensor]:
        """Yield `training_inputs` of each (indices, key), and decode up to `depth` requests ahead."""
        if self._overrides("training_inputs"):
            yield from super().training_batches(requests, depth)
            return
        shaped = ((indices, (indices.shape, key)) for indices, key in requests)
        for stored, (shape, key) in self._feed.fetch_ahead(shaped, depth):
            yield self._trained_on(stored, shape, key)

    def read_batches(self, requests: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Stored | Tensor]:
        """Yield stored images on the device, where `prepare` augments them.

        For a subclass with its own training images, these are yielded instead.
        """
        if self._overrides("training_inputs", "training_batches"):
            yield from super().read_batches(requests)
            return
        for stored, _ in self._feed.fetch_ahead(requests, READ_AHEAD):
            yield stored

    def prepare(self, read: Stored | Tensor, shape: torch.Size, key: Tensor) -> Tensor:
        """Return augmented and normalized images."""
        return read if isinstance(read, Tensor) else self._trained_on(read, shape, key)

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(ImageDataset, name) for name in names)

    def unaugmented(self) -> "ImageDataset":
        """Return the same dataset without augmentation: training images are the same as in evaluations."""
        changed = copy.copy(self)
        changed.augmentation = None
        return changed

    def normalized_by(self, mean: Sequence[float], std: Sequence[float]) -> "ImageDataset":
        """Return the same dataset with other channel means and deviations, such as those of a pretrained network."""
        changed = copy.copy(self)
        changed.normalization = _normalization(self.name, mean, std, self._feed.device)
        return changed if self._compiled is None else changed.compiled()

    def to(self, device: torch.device) -> "ImageDataset":
        """Return the same dataset on `device`. Decoded images in memory are shared with this one."""
        device = torch.device(device)
        moved = copy.copy(self)
        if device != self._feed.device:
            moved._feed = Feed(self._feed.store, device)  # noqa: SLF001 - its own kind
        moved._compiled = None  # noqa: SLF001 - it belongs to the other device
        moved.labels = self.labels.to(device)
        moved.normalization = (self.normalization[0].to(device), self.normalization[1].to(device))
        return moved

    def compiled(self) -> "ImageDataset":
        """Return the same dataset with compiled augmentation: a few kernels instead of hundreds, after a slow start."""
        changed = copy.copy(self)
        changed._compiled = Compiled(changed._augment)  # noqa: SLF001 - its own kind
        return changed

    @property
    def storage_size(self) -> int:
        """The side of the stored images, in pixels."""
        return self._feed.store.size

    @property
    def cached_in(self) -> CacheMode:
        """The cache of decoded images: "device", "memory" or "none"."""
        return self._feed.place

    @property
    def skipped(self) -> tuple[str, ...]:
        """Files in the dataset's folder that are not used; `left_out` says why."""
        return tuple(sorted(each.path for each in self.left_out))

    def check(
        self,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
        *,
        keep: bool = True,
        among: slice = slice(None),
    ) -> None:
        """Decode every image, so that corrupt ones are found before training. Raise one error that lists them.

        With `keep`, images are kept if they fit into memory, so that training does not decode them again. `progress` is
        called with the number of images done and the number of images to decode. `among` selects these, so that several
        processes can divide the images.
        """
        if self._checked:
            return
        corrupt = [error for _, error in self._feed.store.corrupt(keep=keep, progress=progress, among=among)]
        if len(corrupt) > 1:
            shown = "; ".join(f"{error.path} ({error.reason})" for error in corrupt[:SHOWN_CORRUPT])
            more = f"; and {len(corrupt) - SHOWN_CORRUPT} more" if len(corrupt) > SHOWN_CORRUPT else ""
            raise SandmaskError(
                f"{len(corrupt)} images cannot be decoded: {shown}{more}. Replace or remove them, or leave them out "
                "with --skip-corrupt (in Python: skip_corrupt=True)."
            )
        if corrupt:
            raise corrupt[0]
        self._checked = among == slice(None)

    def close(self) -> None:
        """End the decoding threads now instead of at garbage collection."""
        self._feed.store.close()

    def _evaluated(self, stored: Stored, shape: torch.Size) -> Tensor:
        images = evaluated(stored.pixels, self.input_shape[-1])
        return normalized(images, *self.normalization).reshape(*shape, *self.input_shape)

    def _trained_on(self, stored: Stored, shape: torch.Size, key: Tensor) -> Tensor:
        if self.augmentation is None:
            return self._evaluated(stored, shape)
        pixels = stored.pixels.permute(0, 3, 1, 2)
        draws = draws_of(key.to(pixels.device), shape)  # not compiled: Inductor has no 64-bit products of indices
        augment = self._compiled or self._augment
        done: Tensor = augment(pixels.reshape(*shape, *pixels.shape[1:]), draws, stored.aspects.reshape(shape))
        return done

    def _augment(self, images: Tensor, draws: Tensor, aspects: Tensor) -> Tensor:
        assert self.augmentation is not None
        return normalized(self.augmentation.apply(images, draws, aspects), *self.normalization)


def evaluated(pixels: Tensor, size: int) -> Tensor:
    """Return stored pixels [n, side, side, 3] resized for evaluation: [n, 3, size, size] in 0..1."""
    images = pixels.permute(0, 3, 1, 2) / 255.0
    if images.shape[-1] == size:
        return images
    return F.interpolate(images, (size, size), mode="bilinear", antialias=True)


def normalized(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return images [..., 3, h, w] minus the mean of the channels, divided by their standard deviation."""
    return (images - mean[:, None, None]) / std[:, None, None]


def _storage_size(tree: ImageTree, image_size: int) -> int:
    """Return the default of `storage_size`, which depends on the sizes of about 64 images."""
    every = max(1, len(tree.paths) // 64)
    own = common_size((tree.path(i), tree.content(i)) for i in range(0, len(tree.paths), every))
    larger = image_size * 8 // 7
    return own if own is not None and image_size <= own <= larger else larger


def _without_corrupt(name: str, store: ImageStore) -> ImageStore:
    """Return a store of the images that can be decoded."""
    corrupt = [index for index, _ in store.corrupt()]
    if not corrupt:
        return store
    store.close()
    names = ", ".join(printable(str(store.tree.path(index))) for index in corrupt)
    _log.warning("%s: %d corrupt images are left out: %s", printable(name), len(corrupt), names)
    left = store.tree.without(corrupt, "cannot be decoded")
    for domain, begin, end in zip(left.domains, left.bounds, left.bounds[1:], strict=False):
        if begin == end:
            raise SandmaskError(f"{name}, domain {domain!r}: none of its images can be decoded.")
    return ImageStore(left, store.size, workers=store.workers, cache=store.cache)


def _normalization(
    name: str, mean: Sequence[float], std: Sequence[float], device: torch.device
) -> tuple[Tensor, Tensor]:
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise SandmaskError(
            f"{name}: `mean` and `std` should be three numbers each, `std` above 0. "
            f"Found `mean` = {tuple(mean)}, `std` = {tuple(std)}."
        )
    return torch.tensor(tuple(mean), device=device), torch.tensor(tuple(std), device=device)


def _check_packages() -> None:
    missing = [package for package in ("PIL", "torchvision") if find_spec(package) is None]
    if missing:
        raise SandmaskError(
            f"Images need the packages Pillow and torchvision: install sandmask[vision] (no {missing[0]})."
        )


def _check_options(name: str, image_size: int, storage_size: int | None, cache: str, workers: int | None) -> None:
    if image_size < 8:
        raise SandmaskError(f"{name}: option `image_size` should be 8 or more. Found `image_size` = {image_size}.")
    if storage_size is not None and not image_size <= storage_size <= 2 * image_size:
        raise SandmaskError(
            f"{name}: option `storage_size` should lie between `image_size` ({image_size}) and twice that, "
            f"since crops are resized without a filter. Found `storage_size` = {storage_size}."
        )
    if cache not in CACHE_MODES:
        raise SandmaskError(f"{name}: unknown `cache` = {cache!r}. {closest(str(cache), list(CACHE_MODES))}")
    if workers is not None and workers < 1:
        raise SandmaskError(f"{name}: option `workers` should be 1 or more. Found `workers` = {workers}.")
