"""Decode the images of a dataset ahead in several threads, and keep them in memory or on the device."""

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sandmask._memory import free_memory
from sandmask.datasets._decode import CorruptImageError, decode
from sandmask.datasets._tree import ImageTree

CacheMode = Literal["auto", "device", "memory", "none"]
CACHE_MODES: tuple[CacheMode, ...] = ("auto", "device", "memory", "none")

MEMORY_SHARE = 0.6  # share of the free memory that images may use
FALLBACK = 8 * 2**30  # bytes that are assumed to be free if the system does not say
DEVICE_SHARE = 0.4  # share of the free GPU memory that images may use; the network needs the rest
CHECK_BLOCK = 256  # number of images that are checked between two reports of progress
FILL_BLOCK = 64  # number of images per batch when the cache on the device is filled

T = TypeVar("T")


def place_cache(mode: CacheMode, n_bytes: int, device: torch.device) -> CacheMode:
    """Return the place where images are kept. "auto" means "device" if `n_bytes` fit there, else "memory", else "none".

    On the CPU, "device" means "memory".
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
    """Decoded images of one size."""

    pixels: Tensor  # [n, size, size, 3] uint8
    aspects: Tensor  # [n] float32: width / height of the original image

    @classmethod
    def empty(cls, n: int, size: int, **where: Any) -> "Stored":
        """Return memory for `n` images. `where` are arguments of `torch.empty`."""
        with torch.inference_mode(mode=False):  # other threads cannot write to inference tensors
            return cls(torch.empty(n, size, size, 3, dtype=torch.uint8, **where), torch.empty(n, **where))

    def to(self, device: torch.device) -> "Stored":
        """Return these images on `device`. Pinned memory is copied without waiting."""
        return Stored(self.pixels.to(device, non_blocking=True), self.aspects.to(device, non_blocking=True))


class _Kept(NamedTuple):
    """The decoded images by index, and which of them have been decoded."""

    images: Stored
    filled: bytearray  # [N]


class Reading:
    """A batch that is being read."""

    def __init__(self, batch: Stored, parts: Sequence["Future[None]"], stop: threading.Event) -> None:
        self._batch = batch
        self._parts = parts
        self._stop = stop

    def result(self) -> Stored:
        """Wait for the batch and return it. When all readers have ended, the first error of a reader is raised."""
        try:
            wait(self._parts)
        except BaseException:
            self.cancel()
            raise
        for part in self._parts:
            part.result()
        return self._batch

    def cancel(self) -> None:
        """Stop the readers after their current image."""
        self._stop.set()
        for part in self._parts:
            part.cancel()


class ImageStore:
    """Reads images by index, and keeps them if they fit into memory. Threads decode without holding Python's lock.

    The threads start with the first read. They end with the store: by garbage collection, by `close`, or at exit.
    """

    def __init__(self, tree: ImageTree, size: int, *, workers: int | None = None, cache: CacheMode = "auto") -> None:
        self.tree = tree
        self.size = size
        self.workers = workers or min(16, os.cpu_count() or 1)
        self.cache: CacheMode = cache
        self.n_bytes = len(tree.paths) * size * size * 3
        self.keep = place_cache(cache, self.n_bytes, torch.device("cpu")) == "memory"
        self._kept: _Kept | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without threads and images, so that another process decodes images itself."""
        return {**vars(self), "_kept": None, "_pool": None}

    def start(
        self,
        indices: Tensor,
        *,
        pin: bool = False,
        keep: bool = True,
        ready: Callable[[], None] | None = None,
    ) -> Reading:
        """Start to read the images with these indices ([n], on the CPU).

        `pin` uses pinned memory for the batch. `keep=False` is for images that are read only once; they are not kept
        even if the store keeps others. The readers call `ready` before they read `indices`.
        """
        n = len(indices)
        batch = Stored.empty(n, self.size, pin_memory=pin)
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
                # A single call, because each call needs Python's lock, which the training thread needs, too.
                for source, target in zip(kept.images, batch, strict=True):
                    np.take(source.numpy(), numbers, axis=0, out=target[part].numpy(), mode="wrap")
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
        self,
        *,
        keep: bool = False,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
        among: slice = slice(None),
    ) -> list[tuple[int, CorruptImageError]]:
        """Decode every image, and return (index, error) for those that cannot be decoded.

        With `keep`, the others are kept if the store keeps images. `among` selects the images to decode. `progress` is
        called with the number of images done and the number of images to decode.
        """
        keep = keep and self.keep
        if keep:
            self._reserve()

        def error_of(index: int) -> CorruptImageError | None:
            try:
                self._image(index, keep)
            except CorruptImageError as error:
                return error
            return None

        found: list[tuple[int, CorruptImageError]] = []
        pool = self._threads()
        looked_at = range(len(self.tree.paths))[among]
        for begin in range(0, len(looked_at), CHECK_BLOCK):
            numbers = looked_at[begin : begin + CHECK_BLOCK]
            errors = pool.map(error_of, numbers)
            found += [(i, error) for i, error in zip(numbers, errors, strict=True) if error is not None]
            progress(begin + len(numbers), len(looked_at))
        return found

    def close(self) -> None:
        """End the threads. A later read starts them again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def forget(self) -> None:
        """Free the images in memory, after they were copied to the device."""
        self._kept = None

    def _reserve(self) -> None:
        if self._kept is None:  # the system provides memory only when images are written
            n = len(self.tree.paths)
            self._kept = _Kept(Stored.empty(n, self.size), bytearray(n))

    def _image(self, index: int, keep: bool) -> tuple[Tensor, Tensor | float]:
        kept = self._kept
        if kept is not None and kept.filled[index]:
            return kept.images.pixels[index], kept.images.aspects[index]
        pixels, aspect = decode(self.tree.path(index), self.size, self.tree.content(index))
        if keep and kept is not None:
            # Two threads may write the same image at the same time. They write the same bytes.
            kept.images.pixels[index] = pixels
            kept.images.aspects[index] = aspect
            kept.filled[index] = 1
        return pixels, aspect

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool_process != os.getpid():  # threads do not survive a fork
            pool = ThreadPoolExecutor(self.workers, thread_name_prefix="sandmask-decode")
            self._pool, self._pool_process = pool, os.getpid()
            weakref.finalize(self, pool.shutdown, wait=False, cancel_futures=True)
        return self._pool


class Feed:
    """Provides the images of a store on a device. It decides once where they are kept."""

    def __init__(self, store: ImageStore, device: torch.device) -> None:
        self.store = store
        self.device = device
        place = place_cache(store.cache, store.n_bytes, device)
        self.place: CacheMode = place if place == "device" or store.keep else "none"
        self._all: Stored | None = None
        self._copies: torch.cuda.Stream | None = None

    def fetch(self, indices: Tensor) -> Stored:
        """Return the images with these indices, in the order of the flattened `indices`."""
        if self.place == "device":
            images = self._on_device()
            flat = indices.to(self.device).reshape(-1)
            return Stored(images.pixels[flat], images.aspects[flat])
        return self._arrived(self._start(indices).result())

    def fetch_ahead(self, requests: Iterable[tuple[Tensor, T]], depth: int) -> Iterator[tuple[Stored, T]]:
        """Yield (images, tag) for each (indices, tag). Up to `depth` requests are decoded while the caller computes."""
        if self.place == "device":
            for indices, tag in requests:
                yield self.fetch(indices), tag
        else:
            yield from self._decode_ahead(requests, depth, keep=True)

    def _start(self, indices: Tensor, *, keep: bool = True) -> Reading:
        numbers = indices.reshape(-1)
        pin = self.device.type == "cuda"
        if numbers.device.type == "cpu":
            return self.store.start(numbers, pin=pin, keep=keep)
        # The readers, but not the caller, wait until the indices have arrived from the device.
        here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=pin)
        here.copy_(numbers, non_blocking=True)
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrival.record(torch.cuda.current_stream(numbers.device))
        return self.store.start(here, pin=pin, keep=keep, ready=arrival.synchronize)

    def _decode_ahead(
        self, requests: Iterable[tuple[Tensor, T]], depth: int, *, keep: bool
    ) -> Iterator[tuple[Stored, T]]:
        waiting: deque[tuple[Reading, T]] = deque()
        try:
            for indices, tag in requests:
                waiting.append((self._start(indices, keep=keep), tag))
                if len(waiting) > depth:
                    yield self._next(waiting)
            while waiting:
                yield self._next(waiting)
        finally:  # also if the caller stops early, is interrupted, or drops the iterator
            for reading, _ in waiting:
                reading.cancel()

    def _next(self, waiting: deque[tuple[Reading, T]]) -> tuple[Stored, T]:
        reading, tag = waiting[0]
        batch = self._arrived(reading.result())
        waiting.popleft()
        return batch, tag

    def _arrived(self, batch: Stored) -> Stored:
        """Return the batch on the device. A GPU copies it while it computes earlier work."""
        if self.device.type != "cuda":
            return batch.to(self.device)
        if self._copies is None:
            self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            moved = batch.to(self.device)
        current.wait_stream(self._copies)
        for tensor in moved:
            tensor.record_stream(current)  # its memory belongs to the other stream, and is needed in this one
        return moved

    def _on_device(self) -> Stored:
        """Return all images on the device. The first call decodes them."""
        if self._all is None:
            n = len(self.store.tree.paths)
            images = Stored.empty(n, self.store.size, device=self.device)
            blocks = ((block, block) for block in torch.split(torch.arange(n), FILL_BLOCK))
            for batch, block in self._decode_ahead(blocks, 8, keep=False):
                begin, end = int(block[0]), int(block[-1]) + 1
                images.pixels[begin:end] = batch.pixels
                images.aspects[begin:end] = batch.aspects
            self._all = images
            self.store.forget()
        return self._all
