"""Running moments: one environment, several, or other moments at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor

from sandmask.masks import ANDMask, GradientMoments, SANDMask


@pytest.fixture
def grads() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, 4, 3, generator=generator), torch.randn(6, 5, generator=generator)]


def environment(grads: list[Tensor], e: int) -> list[Tensor]:
    return [grad[e] for grad in grads]


def test_moments_are_those_of_numpy(grads: list[Tensor]) -> None:
    moments = GradientMoments(log_magnitude=True)
    for e in range(6):
        moments.update(environment(grads, e))
    assert moments.count == 6
    for i, grad in enumerate(grads):
        g = grad.double().numpy()
        np.testing.assert_allclose(moments.mean[i], g.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(moments.variance[i], g.var(0, ddof=1), rtol=1e-5)
        np.testing.assert_allclose(moments.sign_sum[i], np.sign(g).sum(0))
        np.testing.assert_allclose(moments.agreement[i], abs(np.sign(g).mean(0)), rtol=1e-6)
        np.testing.assert_allclose(moments.log_sum[i], np.log(abs(g) + 1e-10).sum(0), rtol=1e-5, atol=1e-5)
        one = moments.of(i)
        assert one is not None
        assert one.m2 is moments.m2[i]


def test_memory_does_not_grow_with_environments() -> None:
    moments = GradientMoments()
    for _ in range(50):
        moments.update(torch.randn(1000))
    buffers = [moments.mean, moments.m2, moments.sign_sum]
    assert sum(buffer.numel() for buffer in buffers) == 3000
    assert moments.log_sum is None


def test_the_record_for_the_finite_check_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandmask.masks._finite._MOST_PENDING", 10)
    moments = GradientMoments()
    for e in range(100):
        moments.update(torch.full((2,), float("nan") if e == 3 else 1.0))
        assert moments.finite is not None
        assert len(moments.finite.pending) <= 11
    with pytest.raises(ValueError, match="environment 3 "):
        moments.check_finite()


def test_none_is_a_gradient_of_zeros(grads: list[Tensor]) -> None:
    a, b = grads
    with_none, with_zeros = GradientMoments(log_magnitude=True), GradientMoments(log_magnitude=True)
    for e in range(6):
        with_none.update([a[e], b[e] if e in (2, 4) else None])
        with_zeros.update([a[e], b[e] if e in (2, 4) else torch.zeros_like(b[e])])
    for name in ("mean", "m2", "sign_sum", "log_sum"):
        torch.testing.assert_close(getattr(with_none, name), getattr(with_zeros, name))


def test_a_tensor_without_any_gradient_stays_none() -> None:
    moments = GradientMoments().update([torch.ones(2), None]).update([torch.ones(2), None])
    assert moments.mean[1] is None
    assert moments.of(1) is None
    assert ANDMask(1.0).from_moments(moments)[1] is None


def test_merging_moments_in_which_different_tensors_had_gradients(grads: list[Tensor]) -> None:
    a, b = grads
    left = GradientMoments().update([a[0], None]).update([a[1], None])
    right = GradientMoments().update([None, b[2]])
    zero_a, zero_b = torch.zeros_like(a[0]), torch.zeros_like(b[0])
    expected = GradientMoments.of_gradients([torch.stack([a[0], a[1], zero_a]), torch.stack([zero_b, zero_b, b[2]])])
    for merged in (GradientMoments().merge(left).merge(right), GradientMoments().merge(right).merge(left)):
        assert merged.count == 3
        for name in ("mean", "m2", "sign_sum"):
            torch.testing.assert_close(getattr(merged, name), getattr(expected, name))
    assert left.count == 2
    assert left.of(1) is None


def test_merging_leaves_the_other_alone(grads: list[Tensor]) -> None:
    other = GradientMoments.of_gradients(grads)
    before = [t.clone() for t in other.mean]
    GradientMoments().merge(other).merge(other).update(environment(grads, 0))
    assert all(torch.equal(x, y) for x, y in zip(other.mean, before, strict=True))


def test_updates_do_not_keep_or_change_the_gradients(grads: list[Tensor]) -> None:
    original = [t.clone() for t in environment(grads, 0)]
    first = environment(grads, 0)
    moments = GradientMoments().update(first)
    first[0].fill_(7.0)
    torch.testing.assert_close(moments.mean[0], original[0])
    moments.update(original).update(original)
    assert torch.equal(original[1], grads[1][0])


def test_bfloat16_accumulates_in_float32() -> None:
    grads = (torch.randn(200, 50) * 0.01 + 1.0).bfloat16()
    streamed = GradientMoments()
    for grad in grads:
        streamed.update(grad)
    assert streamed.mean.dtype == torch.float32
    torch.testing.assert_close(streamed.mean, grads.float().mean(0))
    torch.testing.assert_close(streamed.variance, grads.float().var(0), rtol=1e-3, atol=0)
    assert GradientMoments().update(torch.ones(2, dtype=torch.float64)).mean.dtype == torch.float64


def test_mixed_dtypes_and_many_tensors_go_through_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandmask.masks._moments._BUCKET", 20)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    grads = [torch.randn(3, 1 + 3 * i).to(dtypes[i % 4]) for i in range(12)]
    streamed = GradientMoments()
    for e in range(3):
        streamed.update(environment(grads, e))
    assert len(streamed.buckets()) > 4
    masked = SANDMask(0.2).from_moments(streamed)
    for grad, result in zip(grads, masked, strict=True):
        assert result.dtype == grad.dtype
        torch.testing.assert_close(result, SANDMask(0.2)(grad), atol=1e-5, rtol=1e-5)


def test_channels_last_gradients_stay_channels_last() -> None:
    grads = [torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last) for _ in range(3)]
    moments = GradientMoments()
    for grad in grads:
        moments.update([grad])
    assert ANDMask(1.0).from_moments(moments)[0].is_contiguous(memory_format=torch.channels_last)


def test_repr() -> None:
    moments = GradientMoments()
    assert repr(moments) == "GradientMoments(0 environments of nothing yet)"
    moments.update([torch.ones(1)])
    assert repr(moments) == "GradientMoments(1 environments of a sequence of 1 tensors)"
