"""Masks inside `torch.func.vmap`, with one threshold a run, and many tensors packed into one."""

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from sandmask.masks import (
    ANDMask,
    GeometricMean,
    GradientMoments,
    Mask,
    SANDMask,
    and_weights,
    rescale_by_sparsity,
    sand_weights,
)
from sandmask.masks import _base as evaluation

RESCALES = ["none", "sparsity"]


def family(tau: float | Tensor, rescale: str) -> list[Mask]:
    return [
        ANDMask(tau, rescale=rescale),  # type: ignore[arg-type]
        SANDMask(tau, rescale=rescale),  # type: ignore[arg-type]
        SANDMask(tau, rescale=rescale, dispersion="absolute", gain=3.0),  # type: ignore[arg-type]
        GeometricMean(tau, rescale=rescale),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("rescale", RESCALES)
@pytest.mark.parametrize("member", range(4))
def test_runs_in_a_stack_equal_runs_alone(member: int, rescale: str) -> None:
    taus, grads = torch.tensor([0.0, 1 / 3, 0.5, 0.9]), torch.randn(4, 6, 3, 5)

    def run(tau: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
        mask = family(tau, rescale)[member]
        moments = GradientMoments.of_gradients(grads, log_magnitude=mask.needs_log_magnitude, check_finite=False)
        return mask.from_moments(moments), mask(grads, check_finite=False)

    stacked = vmap(run)(taus, grads)
    for k, tau in enumerate(taus.tolist()):
        alone = family(tau, rescale)[member](grads[k])
        torch.testing.assert_close(stacked[0][k], alone)
        torch.testing.assert_close(stacked[1][k], alone)


def test_gains_may_differ_from_run_to_run() -> None:
    gains, grads = torch.tensor([1e-3, 10.0]), torch.randn(5, 4)
    stacked = vmap(lambda gain: SANDMask(0.1, dispersion="absolute", gain=gain)(grads, check_finite=False))(gains)
    for k, gain in enumerate(gains.tolist()):
        torch.testing.assert_close(stacked[k], SANDMask(0.1, dispersion="absolute", gain=gain)(grads))


@pytest.mark.parametrize("chunk", [3 * 2, 2**18])
def test_chunks_under_vmap(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandmask.masks._two_pass._CHUNK_CPU", chunk)
    grads = torch.randn(2, 3, 5)
    stacked = vmap(lambda g: ANDMask(1.0)(g, check_finite=False))(grads)
    torch.testing.assert_close(stacked, torch.stack([ANDMask(1.0)(g) for g in grads]))


def test_padding_does_not_count_in_the_density() -> None:
    weights, masked, valid = (
        torch.tensor([1.0, 0.0, 0.0]),
        torch.tensor([2.0, 0.0, 0.0]),
        torch.tensor([1.0, 1, 0]),
    )
    assert rescale_by_sparsity(masked, weights, valid).tolist() == pytest.approx([4, 0, 0])
    assert rescale_by_sparsity(masked, weights).tolist() == pytest.approx([6, 0, 0])


def test_functions_on_plain_moments() -> None:
    signs, mean, m2 = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0])
    assert and_weights(signs, 3, 0.5).tolist() == [1, 0]
    assert sand_weights(signs, mean, m2, 3, 0.0).tolist() == pytest.approx([0.761594, 0.321513], rel=1e-5)


@pytest.mark.parametrize("rescale", RESCALES)
@pytest.mark.parametrize("member", range(4))
def test_packed_tensors_give_what_each_gives_alone(member: int, rescale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = family(0.4, rescale)[member]
    shapes = [(4, 3, 2, 2), (7,), (), (0,), (5, 1, 3), (2, 6)]
    moments = mask.new_moments()
    for e in range(4):
        grads = [torch.randn(shape) for shape in shapes]
        grads[0] = grads[0].contiguous(memory_format=torch.channels_last)
        if e != 2:  # a gradient may lie differently from one environment to the next
            grads[5] = grads[5].t().contiguous().t()
        moments.update(grads)
    packed = mask.from_moments(moments), mask.weights_from_moments(moments)
    monkeypatch.setattr(evaluation, "packs", lambda tensors: False)
    alone = mask.from_moments(moments), mask.weights_from_moments(moments)
    torch.testing.assert_close(packed, alone)
    for found, expected in zip(packed[0], alone[0], strict=True):
        assert found.stride() == expected.stride()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("member", range(4))
def test_masks_on_a_gpu(member: int) -> None:
    mask = family(0.4, "sparsity")[member]
    grads = [torch.randn(5, 64, 3, 3), torch.randn(5, 10).bfloat16(), torch.randn(5, 2, dtype=torch.float64)]
    moments = mask.new_moments()
    for e in range(5):
        moments.update([grad[e].cuda() for grad in grads])
    for found, expected in zip(mask.from_moments(moments), mask(grads), strict=True):
        assert found.is_cuda
        torch.testing.assert_close(
            found.cpu(), expected, rtol=1e-2 if found.dtype == torch.bfloat16 else 1e-4, atol=1e-5
        )
    moments.update([torch.full_like(grads[0][0], float("nan")).cuda(), grads[1][0].cuda(), grads[2][0].cuda()])
    with pytest.raises(ValueError, match="gradient 0 in environment 5"):
        mask.from_moments(moments)
