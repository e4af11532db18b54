"""Bring decoded images to the device: from there, from memory or from files, ahead of need."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from sandmask.datasets._store import CacheMode, ImageStore, Reading, Stored, place_cache

T = TypeVar("T")
FILL_BLOCK = 64  # images a time when the device's cache is filled


class Feed:
    """Images of a store on a device. Where they are kept is decided here, once."""

    def __init__(self, store: ImageStore, device: torch.device, cache: CacheMode) -> None:
        self.store = store
        self.device = device
        n_bytes = len(store.tree.paths) * store.size * store.size * 3
        place = place_cache(cache, n_bytes, device)
        self.place: CacheMode = place if place == "device" or store.keep else "none"
        self._all: Stored | None = None

    def fetch(self, indices: Tensor) -> Stored:
        """The images with these numbers, in order of the flattened `indices`."""
        if self.place == "device":
            images = self._on_device()
            flat = indices.to(self.device).reshape(-1)
            return Stored(images.pixels[flat], images.aspects[flat])
        return self._start(indices).result().to(self.device)

    def fetch_ahead(self, requests: Iterable[tuple[Tensor, T]], depth: int) -> Iterator[tuple[Stored, T]]:
        """Serve (indices, anything) in turn; up to `depth` requests are decoded while the caller computes."""
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
        # The readers wait for the numbers to arrive from the device, and the caller goes on.
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
        finally:  # also when the caller stops early, is interrupted, or forgets the iterator
            for reading, _ in waiting:
                reading.cancel()

    def _next(self, waiting: deque[tuple[Reading, T]]) -> tuple[Stored, T]:
        reading, tag = waiting[0]
        batch = reading.result().to(self.device)
        waiting.popleft()
        return batch, tag

    def _on_device(self) -> Stored:
        """All images; decoded at the first call."""
        if self._all is None:
            n, size = len(self.store.tree.paths), self.store.size
            images = Stored(
                torch.empty(n, size, size, 3, dtype=torch.uint8, device=self.device),
                torch.empty(n, device=self.device),
            )
            blocks = ((block, block) for block in torch.split(torch.arange(n), FILL_BLOCK))
            for batch, block in self._decode_ahead(blocks, 8, keep=False):
                begin, end = int(block[0]), int(block[-1]) + 1
                images.pixels[begin:end] = batch.pixels
                images.aspects[begin:end] = batch.aspects
            self._all = images
            self.store.forget()
        return self._all
