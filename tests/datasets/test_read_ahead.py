import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def test_decoding_goes_on_while_the_caller_computes(data: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = threading.Semaphore(0)

    def watched(*image: Any) -> object:
        result = decode(*image)
        finished.release()
        return result

    monkeypatch.setattr("sandmask.datasets._store.decode", watched)
    batches = data.training_batches(iter(requests(10)), depth=4)
    next(batches)
    for _ in range(10):  # two images of each of five requests, without asking for more
        assert finished.acquire(timeout=60)


def test_stopping_early_stops_the_readers(data: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, stopped = [], threading.Event()

    def counted(*image: Any) -> object:
        decoded.append(image)
        if len(decoded) > 1:
            stopped.wait(60)
        return decode(*image)

    monkeypatch.setattr("sandmask.datasets._store.decode", counted)
    many = [(torch.zeros(200, dtype=torch.int64), key_of(i)) for i in range(5)]
    batches = data.training_batches(iter([(torch.tensor([0]), key_of(0)), *many]), depth=4)
    next(batches)
    del batches
    gc.collect()
    stopped.set()
    pool = data._feed.store._pool
    assert pool is not None
    pool.shutdown()  # waits for what was begun, and for what was not withdrawn
    assert len(decoded) < 800  # of four requests that were read ahead


def test_an_error_in_the_requests_reaches_the_caller(data: ImageDataset) -> None:
    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield requests(1)[0]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(data.training_batches(broken()))


def test_readers_wait_for_numbers_that_are_on_their_way(data: ImageDataset) -> None:
    numbers = torch.zeros(2, dtype=torch.int64)
    arrived = threading.Event()
    reading = data._feed.store.start(numbers, ready=lambda: assert_true(arrived.wait(60)))
    numbers[:] = torch.tensor([3, 7])
    arrived.set()
    expected = data._feed.store.start(torch.tensor([3, 7])).result()
    assert torch.equal(reading.result().pixels, expected.pixels)


def assert_true(value: bool) -> None:
    assert value


def test_images_on_the_device_need_no_readers(make_folder: MakeFolder) -> None:
    """The CPU stands in for a GPU: everything is decoded at the first request, and the files may then go."""
    root = make_folder()
    plain = load_dataset(root, image_size=24, cache="none")
    indices = torch.tensor([[0, 11], [5, 5]])
    expected = plain.inputs(indices), plain.training_inputs(indices, key_of(1))
    data = load_dataset(root, image_size=24)
    assert isinstance(data, ImageDataset)
    data._feed.place = "device"
    assert data.resident
    data.inputs(torch.tensor([0]))
    assert data._feed.store._kept is None  # not kept in memory a second time
    data.close()
    for path in root.rglob("*.png"):
        path.unlink()
    assert torch.equal(data.inputs(indices), expected[0])
    assert torch.equal(next(data.training_batches(iter([(indices, key_of(1))]))), expected[1])
    half = data.normalized_by((0.5,) * 3, (0.5,) * 3)  # shares what is on the device
    assert half.inputs(indices).shape == expected[0].shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cache", ["device", "memory", "none"])
def test_a_gpu_sees_the_images_that_a_cpu_sees(make_folder: MakeFolder, cache: str) -> None:
    root = make_folder()
    expected = load_dataset(root, image_size=24)
    data = load_dataset(root, image_size=24, cache=cache).to(torch.device("cuda"))
    assert isinstance(data, ImageDataset)
    assert data.cached_in == cache
    numbers = [torch.tensor([[i % 12, (5 * i) % 12]]) for i in range(9)]
    requests = [(some.cuda(), key_of(i).cuda()) for i, some in enumerate(numbers)]
    for i, got in enumerate(data.training_batches(iter(requests))):
        assert got.device.type == "cuda"
        torch.testing.assert_close(got.cpu(), expected.training_inputs(numbers[i], key_of(i)), atol=1e-3, rtol=0)
    for i, got in enumerate(data.batches(some for some, _ in requests)):
        torch.testing.assert_close(got.cpu(), expected.inputs(numbers[i]), atol=1e-3, rtol=0)


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
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0
