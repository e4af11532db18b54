"""Mixed precision with a real `torch.amp.GradScaler`, on the CPU."""

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import sandmask
from sandmask.masks import ANDMask, GeometricMean, Mask, MaskError, SANDMask

MASKS = [ANDMask(1.0), SANDMask(0.1), SANDMask(0.1, dispersion="absolute")]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def make_losses(model: nn.Module, envs: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [model(torch.randn(5, 4, generator=generator)).square().mean() * (e + 1) for e in range(envs)]


def state(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("clip", [False, True])
def test_a_scaled_step_is_the_step(mask: Mask, clip: bool) -> None:
    stepped = []
    for scaled in (False, True):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=2.0**16, enabled=scaled)
        sandmask.backward(make_losses(model), model.parameters(), mask, scaler=scaler)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        stepped.append(state(model))
        assert any(not torch.equal(a, b) for a, b in zip(stepped[-1], state(make_model()), strict=True))
    torch.testing.assert_close(stepped[1], stepped[0])


def test_gradients_are_left_at_the_scale_that_the_scaler_expects() -> None:
    model, plain = make_model(), make_model()
    scaler = GradScaler("cpu", init_scale=1024.0)
    sandmask.backward(make_losses(model), model.parameters(), ANDMask(1.0), scaler=scaler)
    sandmask.backward(make_losses(plain), plain.parameters(), ANDMask(1.0))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad * 1024)


@pytest.mark.parametrize(
    "mask",
    [*MASKS, ANDMask(0.0, rescale="sparsity"), GeometricMean(0.0), GeometricMean(1.0, rescale="sparsity")],
    ids=repr,
)
def test_an_overflow_skips_the_step_even_where_the_mask_is_zero(mask: Mask) -> None:
    w = torch.tensor([1.0, 1.0], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**16)
    losses = [w[0] + w[1] * 1e36, w[0] - w[1]]  # 1e36 overflows once scaled; its sign disagrees
    sandmask.backward(losses, [w], mask, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [1, 1]
    assert scaler.get_scale() == 2.0**15


def test_small_float16_gradients_survive() -> None:
    # 1e-8 is below float16; times 2^16 it is not, and unscaled in float32 it keeps its value.
    w = torch.ones(2, requires_grad=True)

    def losses() -> list[Tensor]:
        return [(w.half() * 1e-4).float().sum() * size for size in (1e-4, 1.1e-4)]

    sandmask.backward(losses(), [w], SANDMask(0.5))
    assert w.grad is not None
    assert w.grad.tolist() == [0, 0]
    w.grad = None
    scaler = GradScaler("cpu", init_scale=2.0**16)
    sandmask.backward(losses(), [w], SANDMask(0.5), scaler=scaler)
    scaler.unscale_(torch.optim.SGD([w], lr=0.1))
    assert w.grad is not None
    assert w.grad.tolist() == pytest.approx([1.05e-8, 1.05e-8], rel=1e-2)
    half = torch.ones(2, dtype=torch.half, requires_grad=True)  # whose gradients are float16 themselves
    sandmask.backward([half.float().sum() * size for size in (1e-8, 1.1e-8)], [half], SANDMask(0.5), scaler=scaler)
    assert half.grad is not None
    assert half.grad.tolist() == pytest.approx([1.05e-8 * 2**16] * 2, rel=1e-2)


def test_autocast_and_scaler_together() -> None:
    model, plain = make_model(), make_model()
    scaler = GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [loss.float() for loss in make_losses(model)]
    sandmask.backward(losses, model.parameters(), ANDMask(0.0), scaler=scaler)
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
    sandmask.backward(make_losses(plain), plain.parameters(), ANDMask(0.0))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=0.05)


def test_a_scaler_works_with_several_dtypes() -> None:
    params = [torch.ones(2, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.bfloat16)]
    scaler = GradScaler("cpu", init_scale=256.0)
    losses = [sum(((p * k).sum().float() for p in params), torch.zeros(())) for k in (1, 3)]
    sandmask.backward(losses, params, ANDMask(1.0), scaler=scaler)
    for p in params:
        assert p.grad is not None
        assert p.grad.dtype == p.dtype
        assert p.grad.tolist() == [512, 512]


@pytest.mark.parametrize("together", [False, True])
def test_losses_that_are_scaled_already_are_an_error(together: bool) -> None:
    model, scaler = make_model(), GradScaler("cpu")
    losses = make_losses(model)
    scaled = scaler.scale(losses) if together else [scaler.scale(loss) / 2 for loss in losses]
    with pytest.raises(MaskError, match=r"factor 65536 .* not scaled"):
        sandmask.backward(scaled, model.parameters(), ANDMask(1.0), scaler=scaler)
    assert all(p.grad is None for p in model.parameters())
    sandmask.backward(make_losses(model), model.parameters(), ANDMask(1.0), scaler=scaler)


def test_what_is_no_scaler_is_refused() -> None:
    class NativeScaler:
        """Timm's, which holds a scaler."""

    model = make_model()
    with pytest.raises(MaskError, match=r"Found NativeScaler\..*`_scaler`"):
        sandmask.backward(make_losses(model), model.parameters(), ANDMask(1.0), scaler=NativeScaler())  # type: ignore[arg-type]
