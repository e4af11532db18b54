"""Several processes that train one run: their process group, consistency checks, and a common stop."""

import itertools
import os
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

from sandmask._signals import TerminatedError, stop_requested
from sandmask._text import first_line
from sandmask._torchrun import world_size
from sandmask.algorithms import Algorithm, State
from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.functional.ranks import ALONE, Ranks
from sandmask.records import RunSpec
from sandmask.training.evaluation import OnBatch
from sandmask.training.precision import choose_device
from sandmask.training.specs import flat_spec

_PATIENCE = timedelta(minutes=10)  # timeout for a process that does not answer
_RELEASE_SECONDS = 0.05
_AGREE_SECONDS = 0.1  # time between exchanges about whether a process received a signal to stop
_group_numbers = itertools.count()
_APART = "Run it in one process, without torchrun."


@contextmanager
def process_group(device: str | None) -> Iterator[Ranks]:
    """Yield the processes that torchrun started; without torchrun, only this process.

    If there is a process group, it is used.

    :param device: where the processes will train, as for `own_device`.
    """
    is_there = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if is_there else world_size()
    if size == 1:
        yield ALONE
        return
    on_cpu = own_device(size, device).type == "cpu"
    if not is_there:
        _start_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl")
    try:
        control = None if "gloo" in dist.get_backend_config() else dist.new_group(backend="gloo")
        yield Ranks(dist.get_rank(), size, control if on_cpu else None, control)
    finally:
        if not is_there:
            leave_group()


def leave_group() -> None:
    """Destroy the process group, after a pause in which its threads release their tensors.

    The threads need the GIL to release tensors, and the destructor of the group waits for them while it holds the GIL.
    """
    time.sleep(_RELEASE_SECONDS)
    dist.destroy_process_group()


def _start_group(backend: str) -> None:
    """Start a process group. Each run of a program has its own group and its own prefix in the store."""
    try:
        store, rank, size = _rendezvous()
        place = PrefixStore(f"sandmask/{next(_group_numbers)}", store)
        dist.init_process_group(backend, store=place, rank=rank, world_size=size, timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = first_line(error).rstrip(".")
        raise SandmaskError(f"The processes of this run cannot reach each other: {reason}.") from error


@cache
def _rendezvous() -> tuple[Any, int, int]:
    """The store that all processes share, the rank of this process, and the number of processes."""
    found: tuple[Any, int, int] = next(iter(rendezvous("env://", timeout=_PATIENCE)))
    return found


def own_device(size: int, text: str | None) -> torch.device:
    """The device of this process: the CPU, or the GPU with the local rank of the process.

    :param size: number of processes.
    :param text: "cpu", "cuda" or None, as for `choose_device`; for a single process also "cuda:1".
    """
    if size == 1 or text not in (None, "cuda") or not torch.cuda.is_available():
        device = choose_device(text)
        if size > 1 and device.type != "cpu":
            raise SandmaskError(
                f"Several processes need --device cpu, or --device cuda and a GPU per process. Found {text!r}."
            )
        return device
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise SandmaskError(f"Each process needs a GPU, but this machine has {count}. Use --nproc-per-node {count}.")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def check_alike(ranks: Ranks, spec: RunSpec, dataset: Dataset, **options: Any) -> None:
    """Raise an error if the processes have different arguments or data."""
    labels = zlib.crc32(dataset.labels.cpu().numpy().data)
    mine = {**flat_spec(spec), **options, "data": (dataset.environments, dataset.classes, labels)}
    first, *others = ranks.of_all(mine)
    for rank, other in enumerate(others, start=1):
        if odd := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            raise SandmaskError(
                f"Process {rank} trains another run than process 0: they differ in {', '.join(odd)}. Start all "
                "processes with the same arguments and data; for several runs, use sandmask sweep."
            )


def check_divides(ranks: Ranks, spec: RunSpec, algorithm: Algorithm, *, compiled: bool) -> None:
    """Raise an error if several processes cannot train this run together."""
    if ranks.size == 1:
        return
    if not algorithm.divides:
        raise SandmaskError(
            f"{spec.algorithm} takes gradients inside its objective, so it cannot be divided over processes. {_APART}"
        )
    if algorithm.network.norms:
        raise SandmaskError(f"With freeze_bn=0, batch-norm needs all examples in one process. {_APART}")
    if compiled or spec.precision == "fp16":
        option = "--compile" if compiled else "--precision fp16"
        raise SandmaskError(f"{option} works in one process only. Leave it out, or run without torchrun.")


def check_equal(ranks: Ranks, state: State) -> None:
    """Raise an error if the processes have different parameters, for example from different library versions."""
    if ranks.size == 1:
        return
    sums = torch.stack([_sum_of_bits(leaf) for leaf in pytree.tree_leaves(state)])
    largest = ranks.largest(torch.cat([sums, -sums]))
    if (largest.view(2, -1).sum(0) != 0).any():
        raise SandmaskError(
            f"The processes of this run have different parameters after step {int(state['step'][0])}. Use the same "
            "versions and hardware in all of them, and rerun to continue from the last checkpoint."
        )


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    kind = torch.int32 if tensor.element_size() % 4 == 0 else torch.uint8
    return tensor.reshape(-1).view(kind).sum(dtype=torch.int64).cpu()


class AgreedStop:
    """Raises `KeyboardInterrupt` between steps after a signal, in all processes after the same step.

    Signals are deferred until then, because an interrupt within `vmap` would leave torch in an invalid state. Several
    processes exchange whether they received a signal about ten times per second. All have to call this equally often.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._asked = time.monotonic()
        self._calls = self._next = 1  # number of calls since the last exchange, and until the next exchange

    def __call__(self, *, now: bool = False) -> None:
        """Raise `KeyboardInterrupt` if a process received a signal. With `now`, always ask the other processes."""
        told: float = stop_requested()
        if self.ranks.size > 1:
            self._next -= 1
            if self._next > 0 and not now:
                return
            seconds = time.monotonic() - self._asked
            told, seconds = self.ranks.largest(torch.tensor([told, seconds], dtype=torch.float64)).tolist()
            rate = self._calls / max(seconds, 1e-6)
            self._calls = self._next = max(1, min(int(rate * _AGREE_SECONDS), 2 * self._calls))
            self._asked = time.monotonic()
        if told:
            raise TerminatedError if told == signal.SIGTERM else KeyboardInterrupt

    def within(self, evaluating: OnBatch | None) -> OnBatch:
        """A callback for evaluations that also checks for signals."""

        def on_batch(done: int, total: int) -> None:
            self()
            if evaluating is not None:
                evaluating(done, total)

        return on_batch
