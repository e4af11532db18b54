"""Moments in place, on a CPU, against the plain ones."""

import threading

import pytest
import torch
from torch import Tensor

from sandmask._scratch import LARGEST, scratch
from sandmask.masks import _two_pass, fold_runs, gradient_moments


def fold(grads: Tensor) -> Tensor:
    found = torch.empty(3, len(grads), grads.shape[2], dtype=grads.dtype)
    fold_runs(grads, found)
    return found


def twin(grads: Tensor) -> Tensor:
    return torch.stack([torch.stack(_two_pass._moments(of_run, log=False)) for of_run in grads], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 1), (3, 5, 7), (2, 16, 300), (4, 1, 9), (2, 3, 0)], ids=str)
def test_equals_the_plain_moments(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    grads = torch.randn(shape, dtype=dtype) + 0.5
    torch.testing.assert_close(fold(grads), twin(grads), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [2, 32, 100, 2**20])
@pytest.mark.parametrize("piece", [1, 7, 16])
def test_in_pieces_as_in_one(chunk: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = torch.randn(3, 4, 50)
    grads[1, 2, 44:46] = torch.tensor([torch.nan, torch.finfo(torch.float32).max])
    whole = fold(grads)
    for name, value in {"_CHUNK_CPU": chunk, "PIECE": piece, "_WHOLE": 0}.items():
        monkeypatch.setattr(_two_pass, name, value)
    torch.testing.assert_close(fold(grads), whole, equal_nan=True)


def test_identical_gradients_have_no_variance() -> None:
    sign_sum, mean, m2 = fold(torch.randn(2, 1, 40).expand(2, 7, 40))
    assert bool((m2 == 0).all())
    assert torch.equal(sign_sum, 7 * mean.sign())


def test_a_run_that_overflows_changes_no_other() -> None:
    grads = torch.randn(3, 4, 20)
    alone = fold(grads)
    largest = torch.finfo(torch.float32).max
    grads[1, :, 3] = torch.tensor([largest, -largest, largest, largest])
    grads[2, 0, 5] = torch.nan
    found = fold(grads)
    assert torch.equal(found[:, 0], alone[:, 0])
    assert float(found[1, 1, 3]) == pytest.approx(largest / 2)
    assert bool(found[1, 2, 5].isnan())
    assert bool(found[1, 2, :5].isfinite().all())


def test_a_run_is_the_same_alone_and_among_others() -> None:
    grads = torch.randn(4, 5, 258)
    assert torch.equal(fold(grads)[:, 2:3], fold(grads[2:3]))


def test_gradients_that_autograd_follows_are_not_folded_in_place() -> None:
    grads = torch.randn(3, 4, requires_grad=True)
    gradient_moments(grads).m2.sum().backward()  # type: ignore[no-untyped-call]
    assert grads.grad is not None
    assert bool((grads.grad != 0).any())


def test_scratch_memory_is_kept_for_each_thread_and_use() -> None:
    first = scratch("test", (2, 3), torch.float32)
    assert scratch("test", (3, 2), torch.float32).data_ptr() == first.data_ptr()
    assert scratch("another test", (2, 3), torch.float32).data_ptr() != first.data_ptr()
    assert scratch("test", (2, 3), torch.float64).dtype == torch.float64
    elsewhere: list[int] = []
    thread = threading.Thread(target=lambda: elsewhere.append(scratch("test", (2, 3), torch.float32).data_ptr()))
    thread.start()
    thread.join()
    assert elsewhere != [first.data_ptr()]
    assert scratch("test", (LARGEST + 1,), torch.uint8).shape == (LARGEST + 1,)


def test_scratch_of_inference_mode_serves_outside_of_it() -> None:
    with torch.inference_mode():
        scratch("inference test", (4,), torch.float32).fill_(1.0)
    scratch("inference test", (4,), torch.float32).fill_(2.0)
