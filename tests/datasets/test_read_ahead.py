import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sandmask.datasets import ImageDataset, load_dataset
from sandmask.datasets._decode import decode
from sandmask.functional.random import fold, key_of

MakeFolder = Callable[..., Path]


@pytest.fixture
def data(make_folder: MakeFolder) -> ImageDataset:
    loaded = load_dataset(make_folder(), image_size=24, cache="none", workers=2)
    assert isinstance(loaded, ImageDataset)
    return loaded


def requests(n: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.tensor([[i % 12, (5 * i) % 12]]), fold(key_of(0), i)) for i in range(n)]


@pytest.mark.parametrize("depth", [0, 1, 4, 50])
def test_read_ahead_serves_in_order(data: ImageDataset, depth: int) -> None:
    expected = [data.training_inputs(*request) for request in requests(9)]
    served = list(data.training_batches(iter(requests(9)), depth))
    assert all(torch.equal(a, b) for a, b in zip(served, expected, strict=True))
    plain = [data.inputs(indices) for indices, _ in requests(9)]
    served = list(data.batches((indices for indices, _ in requests(9)), depth))
    assert all(torch.equal(a, b) for a, b in zip(served, plain, strict=True))


def test_it_reads_ahead_but_not_too_far(data: ImageDataset) -> None:
    asked: list[int] = []

    def watched() -> Iterator[tuple[Tensor, Tensor]]:
        for i, request in enumerate(requests(20)):
            asked.append(i)
            yield request

    batches = data.training_batches(watched(), depth=3)
    next(batches)
    assert len(asked) == 4
    next(batches)
    assert len(asked) == 5


def test_decoding_goes_on_while_the_caller_computes(
    data: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = threading.Semaphore(0)

    def watched(path: Path, size: int | None) -> object:
        result = decode(path, size)
        finished.release()
        return result

    monkeypatch.setattr("sandmask.datasets._store.decode", watched)
    batches = data.training_batches(iter(requests(10)), depth=4)
    next(batches)
    for _ in range(10):  # two images of each of five requests, without asking for more
        assert finished.acquire(timeout=5)


def test_stopping_early_stops_the_readers(data: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []

    def counted(path: Path, size: int | None) -> object:
        decoded.append(path)
        time.sleep(0.01)
        return decode(path, size)

    monkeypatch.setattr("sandmask.datasets._store.decode", counted)
    many = [(torch.zeros(200, dtype=torch.int64), key_of(i)) for i in range(5)]
    batches = data.training_batches(iter([(torch.tensor([0]), key_of(0)), *many]), depth=4)
    next(batches)
    del batches
    gc.collect()
    time.sleep(0.1)
    so_far = len(decoded)
    time.sleep(0.1)
    assert len(decoded) == so_far < 200


def test_an_error_in_the_requests_reaches_the_caller(data: ImageDataset) -> None:
    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield requests(1)[0]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(data.training_batches(broken()))


SCRIPT = """
import sys, torch
from sandmask.datasets import _decode, load_dataset
_decode._decode_natively = lambda path, content: None  # importing torchvision would take most of the time
from sandmask.functional.random import key_of
data = load_dataset(sys.argv[1], image_size=24, cache="none", workers=2)
requests = ((torch.arange(12), key_of(i)) for i in range(10**9))
for i, batch in enumerate(data.training_batches(requests)):
    if i == 3:
        print("running", flush=True)
"""


def test_interrupt_ends_the_process_at_once(make_folder: MakeFolder) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(make_folder())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0
