"""Reusable buffers on a CPU, where allocating a large tensor can cost more than the computation.

A large tensor that is freed goes back to the system, and the next one of its size causes a page fault for each page.
The gradients of a layer for all environments are short-lived, so each step writes them into the same buffer.
"""

import threading
from functools import cache

import torch
from torch import Tensor

LARGEST = 2**22  # largest number of elements in a buffer; each thread, use and dtype has its own
_FREED = 31 * 2**20  # bytes; larger blocks, of over 32 MB, have no effect


class _Kept(threading.local):
    """The tensors that a thread keeps."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype], Tensor] = {}


_kept = _Kept()


def scratch(use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor on the CPU, valid until this thread requests the same `use` again."""
    size = torch.Size(shape).numel()
    if size > LARGEST:
        return torch.empty(shape, dtype=dtype)
    kept = _kept.tensors.get((use, dtype))
    if kept is None or kept.shape[0] < size:
        _raise_trim_threshold()
        with torch.inference_mode(False):  # an inference tensor could not be used outside of that mode
            kept = _kept.tensors[use, dtype] = torch.empty(size, dtype=dtype)
    return kept[:size].view(shape)


def scratch_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, where b has all leading dimensions. On a CPU, the next such product of the thread overwrites it."""
    if a.device.type != "cpu":
        return a @ b
    return torch.matmul(a, b, out=scratch("products", (*b.shape[:-2], a.shape[-2], b.shape[-1]), a.dtype))


@cache
def _raise_trim_threshold() -> None:
    """Make glibc keep more free memory, by freeing a large block once in a process. The block is never written to.

    At the end of its heap, glibc keeps free memory up to twice the size of the largest block that was freed before
    (`man mallopt`, M_MMAP_THRESHOLD). By default, the tensors of a step of a small model are larger than this: their
    memory goes back to the system, and the next step causes a page fault for each page.
    """
    torch.empty(_FREED, dtype=torch.uint8)
