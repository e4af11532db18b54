"""Decoded images of a dataset, read by several threads and kept in memory when they fit."""

import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sandmask._memory import free_memory
from sandmask.datasets._decode import CorruptImageError, decode
from sandmask.datasets._scan import ImageTree

CacheMode = Literal["auto", "device", "memory", "none"]
CACHE_MODES: tuple[CacheMode, ...] = ("auto", "device", "memory", "none")

MEMORY_SHARE = 0.6  # of the memory that is free
FALLBACK = 8 * 2**30  # taken to be free where the system does not say
DEVICE_SHARE = 0.4  # of the GPU memory that is free: the network needs the rest


def place_cache(mode: CacheMode, n_bytes: int, device: torch.device) -> CacheMode:
    """Resolve "auto" for images of this size: "device" if they fit there, else "memory", else
    "none".

    On the CPU, "device" and "memory" are the same and are called "memory".
    """
    if mode == "device" and device.type == "cpu":
        return "memory"
    if mode != "auto":
        return mode
    if device.type == "cuda" and n_bytes <= DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]:
        return "device"
    free = free_memory()
    return "memory" if n_bytes <= MEMORY_SHARE * (FALLBACK if free is None else free) else "none"


class Stored(NamedTuple):
    """A batch of decoded images of one size."""

    pixels: Tensor  # [n, size, size, 3] uint8
    aspects: Tensor  # [n] float32: width / height of the original image

    def to(self, device: torch.device) -> "Stored":
        """The same on `device`; from pinned memory, without waiting."""
        return Stored(self.pixels.to(device, non_blocking=True), self.aspects.to(device, non_blocking=True))


class _Kept(NamedTuple):
    """Decoded images by number, and which of them are there."""

    pixels: Tensor  # [N, size, size, 3] uint8
    aspects: Tensor  # [N] float32
    filled: bytearray  # [N]


class Reading:
    """A batch under way."""

    def __init__(self, batch: Stored, parts: Sequence["Future[None]"], stop: threading.Event) -> None:
        self._batch = batch
        self._parts = parts
        self._stop = stop

    def result(self) -> Stored:
        """Wait for the batch. The first error of a reader is raised here, when all readers have ended."""
        try:
            wait(self._parts)
        except BaseException:
            self.cancel()
            raise
        for part in self._parts:
            part.result()
        return self._batch

    def cancel(self) -> None:
        """Have the readers stop after the image that they are at."""
        self._stop.set()
        for part in self._parts:
            part.cancel()


class ImageStore:
    """Reads images by number. Threads do the work, since decoding runs outside Python's lock.

    The threads start with the first read and end with the store: by garbage collection, by `close`, or at
    exit.
    """

    def __init__(self, tree: ImageTree, size: int, *, workers: int, keep: bool) -> None:
        self.tree = tree
        self.size = size
        self.workers = workers
        self.keep = keep
        self._kept: _Kept | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as the list of files: the other process decodes for itself."""
        return _rebuild, (self.tree, self.size, self.workers, self.keep)

    def start(
        self,
        indices: Tensor,
        *,
        pin: bool = False,
        keep: bool = True,
        ready: Callable[[], None] | None = None,
    ) -> Reading:
        """Begin to read the images with these numbers ([n], on the CPU).

        `pin` puts the batch into memory that a GPU can fetch from on its own. `keep=False` is for images that
        are read once, even where the store keeps others. The readers call `ready` before they look at
        `indices`.
        """
        n = len(indices)
        batch = Stored(
            torch.empty(n, self.size, self.size, 3, dtype=torch.uint8, pin_memory=pin),
            torch.empty(n, pin_memory=pin),
        )
        keep = keep and self.keep
        if keep:
            self._reserve()
        stop = threading.Event()

        def read_some(part: slice) -> None:
            if ready is not None:
                ready()
            numbers = indices[part].tolist()
            kept = self._kept
            if kept is not None and all(kept.filled[number] for number in numbers):
                # In one call: each needs Python's lock, which the thread that trains wants too.
                for source, target in zip(kept[:2], batch, strict=True):
                    np.take(source.numpy(), numbers, axis=0, out=target[part].numpy(), mode="clip")
                return
            for place, number in enumerate(numbers, part.start):
                if stop.is_set():
                    return
                batch.pixels[place], batch.aspects[place] = self._image(number, keep)

        pool = self._threads()
        each = max(1, math.ceil(n / self.workers))
        parts = [slice(first, first + each) for first in range(0, n, each)]
        return Reading(batch, [pool.submit(read_some, part) for part in parts], stop)

    def corrupt(
        self, *, keep: bool = False, progress: Callable[[int, int], None] = lambda _done, _total: None, block: int = 256
    ) -> list[tuple[int, CorruptImageError]]:
        """Decode every image; (number, error) of those that cannot be decoded.

        `keep` keeps the others, where the store keeps images. `progress` gets the numbers of images done and of all.
        """
        keep = keep and self.keep
        if keep:
            self._reserve()
        found: list[tuple[int, CorruptImageError]] = []
        pool = self._threads()
        n = len(self.tree.paths)
        for begin in range(0, n, block):
            numbers = range(begin, min(begin + block, n))
            errors = pool.map(partial(self._why_corrupt, keep=keep), numbers)
            found += [(i, error) for i, error in zip(numbers, errors, strict=True) if error is not None]
            progress(numbers.stop, n)
        return found

    def close(self) -> None:
        """End the threads. A later read starts them again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def forget(self) -> None:
        """Free the kept images, which are elsewhere now."""
        self._kept = None

    def _reserve(self) -> None:
        if self._kept is None:  # pages are taken from the system as images are written to them
            n = len(self.tree.paths)
            pixels = torch.empty(n, self.size, self.size, 3, dtype=torch.uint8)
            self._kept = _Kept(pixels, torch.ones(n), bytearray(n))

    def _why_corrupt(self, index: int, keep: bool) -> CorruptImageError | None:
        try:
            self._image(index, keep)
        except CorruptImageError as error:
            return error
        return None

    def _image(self, index: int, keep: bool) -> tuple[Tensor, Tensor | float]:
        kept = self._kept
        if kept is not None and kept.filled[index]:
            return kept.pixels[index], kept.aspects[index]
        content = self.tree.content(index)
        path = self.tree.path(index)
        pixels, aspect = decode(path, self.size) if content is None else decode(path, self.size, content)
        if keep and kept is not None:
            # Two threads may write the same image at once: the same bytes, so no harm.
            kept.pixels[index] = pixels
            kept.aspects[index] = aspect
            kept.filled[index] = 1
        return pixels, aspect

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool_process != os.getpid():  # threads do not survive a fork
            pool = ThreadPoolExecutor(self.workers, thread_name_prefix="sandmask-decode")
            self._pool, self._pool_process = pool, os.getpid()
            weakref.finalize(self, pool.shutdown, wait=False, cancel_futures=True)
        return self._pool


def _rebuild(tree: ImageTree, size: int, workers: int, keep: bool) -> ImageStore:
    return ImageStore(tree, size, workers=workers, keep=keep)
