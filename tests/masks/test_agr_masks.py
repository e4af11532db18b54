"""Agr-Sum and Agr-Rand as masks: values, and the noise in `sandmask.backward`."""

import pytest
import torch

import sandmask
from sandmask.masks import AgrRand, AgrSum, ANDMask, MaskError

GRADS = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0))


def test_agr_sum_is_a_multiple_of_the_and_mask() -> None:
    torch.testing.assert_close(AgrSum()(GRADS), 3 * ANDMask(tau=1.0)(GRADS))
    assert torch.equal(AgrSum().weights(GRADS), ANDMask(tau=1.0).weights(GRADS))
    assert repr(AgrSum()) == "AgrSum()"


def test_agr_rand_fills_what_agr_sum_leaves_out_with_noise_of_its_size() -> None:
    agreed, filled = AgrSum()(GRADS), AgrRand()(GRADS)
    kept = agreed != 0
    assert torch.equal(filled[kept], agreed[kept])
    size = agreed[kept].abs().mean().item()
    assert filled[~kept].std().item() == pytest.approx(size, rel=0.05)
    assert filled[~kept].mean().item() == pytest.approx(0.0, abs=0.1 * size)


def test_the_size_of_the_noise_is_that_of_all_tensors_together() -> None:
    large, small = 100 * torch.rand(2, 5000), torch.randn(2, 5000).sign() * torch.tensor([[1.0], [-1.0]])
    small = torch.stack([small[0], -small[0]])  # nothing agrees here
    filled = AgrRand()([large, small])
    size = AgrSum()(large).abs().mean().item()
    assert filled[1].std().item() == pytest.approx(size, rel=0.1)


def test_calls_differ_and_seeds_repeat() -> None:
    first, second = AgrRand(seed=3), AgrRand(seed=3)
    calls = [first(GRADS), first(GRADS)]
    assert not torch.equal(*calls)
    assert torch.equal(second(GRADS), calls[0])
    assert torch.equal(second(GRADS), calls[1])
    assert not torch.equal(AgrRand(seed=4)(GRADS), calls[0])


def test_no_agreement_no_noise() -> None:
    assert not AgrRand()(torch.tensor([[1.0, -1.0], [-1.0, 1.0]])).any()


@pytest.mark.parametrize("seed", [-1, 1.5, True])
def test_seeds_are_checked(seed: object) -> None:
    with pytest.raises(MaskError, match="`seed` should be an integer of at least 0"):
        AgrRand(seed=seed)  # type: ignore[arg-type]


def test_backward_takes_both() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    for mask in (sandmask.AgrSum(), sandmask.AgrRand()):
        first, second = model(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
        model.zero_grad()
        report = sandmask.backward([-first, -second], model.parameters(), mask)
        assert model.weight.grad is not None
        assert model.weight.grad[0, 0] == -2.0
        assert (model.weight.grad[0, 1] == 0) == (type(mask) is AgrSum)
        assert report.dead_fraction == 0.5
