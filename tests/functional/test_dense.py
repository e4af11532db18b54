"""Hidden layers, dropout and moments of K runs, against plain operations one run after the other."""

import math

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from sandmask.functional import Dropout, adam_init, adam_step, random
from sandmask.functional.adam import AdamState
from sandmask.functional.dense import affine, dense, layer_of_runs, plain_dense
from sandmask.functional.flat import Slot
from sandmask.functional.tape import MomentTape
from sandmask.gradients import UnsupportedError
from sandmask.masks import ANDMask, Mask, SANDMask, TensorMoments, gradient_moments

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]
on_devices = pytest.mark.parametrize("device", DEVICES)
K, E, B, IN, OUT = 3, 4, 5, 18, 22  # neither side a multiple of 16


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.set_float32_matmul_precision("highest")


def layer(device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return {"x": normal(K, E * B, IN), "weight": normal(K, OUT, IN), "bias": normal(K, OUT)}


def noise(device: str) -> tuple[Tensor, Tensor]:
    rows = random.keys(torch.stack([random.key_of(k) for k in range(K)]), E * B).to(device)
    return rows, torch.tensor([0.0, 0.1, 0.5], device=device)


@on_devices
@pytest.mark.parametrize("drops", [False, True])
def test_a_layer_of_k_runs_and_its_gradients(device: str, drops: bool) -> None:
    own = {name: value.requires_grad_() for name, value in layer(device).items()}
    rows, rate = noise(device)

    def one(k: int) -> Tensor:
        drop = Dropout(rate[k], rows[k]) if drops else None
        return plain_dense(own["x"][k], own["weight"][k], own["bias"][k], drop, site=2)

    expected = torch.stack([one(k) for k in range(K)])
    weights = torch.linspace(-1, 1, expected.numel(), device=device).view(expected.shape)
    wanted = torch.autograd.grad((expected * weights).sum(), list(own.values()))

    def narrow(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return dense(x, weight, bias)[:, :OUT]

    def dropped(x: Tensor, weight: Tensor, bias: Tensor, rows: Tensor, rate: Tensor) -> Tensor:
        return dense(x, weight, bias, Dropout(rate, rows), 2)[:, :OUT]  # on a GPU it may be wider

    if drops:
        found = vmap(dropped)(own["x"], own["weight"], own["bias"], rows, rate)
    else:
        found = vmap(narrow)(own["x"], own["weight"], own["bias"])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found == 0, expected == 0) or not drops
    for one_grad, other in zip(torch.autograd.grad((found * weights).sum(), list(own.values())), wanted, strict=True):
        torch.testing.assert_close(one_grad, other, rtol=1e-4, atol=1e-4)


@on_devices
def test_a_layer_outside_of_vmap_and_with_a_shared_input(device: str) -> None:
    own = layer(device)
    alone = dense(own["x"][0], own["weight"][0], own["bias"][0])[:, :OUT]
    torch.testing.assert_close(alone, F.relu(F.linear(own["x"][0], own["weight"][0], own["bias"][0])))
    shared = vmap(dense, in_dims=(None, 0, 0))(own["x"][0], own["weight"], own["bias"])
    torch.testing.assert_close(shared[0][:, :OUT], alone)
    assert shared[..., OUT:].abs().sum() == 0
    back = vmap(affine)(shared, own["weight"].mT.contiguous(), torch.zeros(K, IN, device=device))
    torch.testing.assert_close(back[0][:, :IN], alone @ own["weight"][0])


def test_what_is_no_number_stays_visible() -> None:
    own = layer("cpu")
    own["x"][0, 0, 0] = float("nan")
    assert layer_of_runs(own["x"], own["weight"], own["bias"])[0, 0].isnan().all()


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_of_k_runs_against_gradients_one_by_one(device: str, dtype: torch.dtype) -> None:
    own = layer(device, dtype)
    rows, rate = noise(device)
    names = {"weight": (OUT, IN), "bias": (OUT,), "unused": (3,)}
    slots = [Slot(name, torch.Size(shape), torch.Size(shape).numel()) for name, shape in names.items()]
    tape = MomentTape(slots, K, E, own["x"])
    leaves = {name: own[name].clone().requires_grad_() for name in ("weight", "bias")}

    def losses(x: Tensor, weight: Tensor, bias: Tensor, rows: Tensor, rate: Tensor) -> Tensor:
        with tape.watch({"weight": weight, "bias": bias}):
            y = dense(x, weight, bias, Dropout(rate, rows), 1)[:, :OUT]
        return y.float().reshape(E, -1).square().mean(1)

    values = vmap(losses)(own["x"], leaves["weight"], leaves["bias"], rows, rate)
    arrived = torch.autograd.grad(values.sum(), list(leaves.values()), allow_unused=True)
    assert all(gradient is None for gradient in arrived)
    found = tape.moments()

    for k in range(K):
        gradients = []
        for e in range(E):
            own_rows = slice(e * B, (e + 1) * B)
            weight, bias = (leaves[name][k].detach().requires_grad_() for name in ("weight", "bias"))
            y = plain_dense(own["x"][k, own_rows], weight, bias, Dropout(rate[k], rows[k, own_rows]), 1)
            pieces = torch.autograd.grad(y.float().square().mean(), (weight, bias))
            gradients.append(torch.cat([piece.float().flatten() for piece in pieces]))
        wanted = gradient_moments(torch.stack(gradients))
        n = len(wanted.mean)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found.mean[k, :n], wanted.mean, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found.m2[k, :n], wanted.m2, rtol=10 * tolerance, atol=10 * tolerance)
        if dtype == torch.float32:
            assert (found.sign_sum[k, :n] - wanted.sign_sum).abs().max() == 0
        assert found.mean[k, n:].abs().max() == 0


@on_devices
def test_scaled_risks_give_the_same_moments(device: str) -> None:
    """Powers of two, so to the bit."""
    own = layer(device)
    slots = [Slot("weight", torch.Size((OUT, IN)), OUT * IN), Slot("bias", torch.Size((OUT,)), OUT)]
    scale = torch.tensor([[1.0, 2.0**-9, 4.0, 2.0**12]], device=device).expand(K, E)
    found = []
    for unscale in (None, 1.0 / scale):
        tape = MomentTape(slots, K, E, own["x"])
        weight, bias = (own[name].clone().requires_grad_() for name in ("weight", "bias"))

        def risks(x: Tensor, weight: Tensor, bias: Tensor, tape: MomentTape = tape) -> Tensor:
            with tape.watch({"weight": weight, "bias": bias}):
                return dense(x, weight, bias).reshape(E, -1).mean(1)

        values = vmap(risks)(own["x"], weight, bias)
        tape.unscale = unscale
        grad = torch.ones_like(values) if unscale is None else scale
        torch.autograd.grad(values, [weight, bias], grad, allow_unused=True)
        found.append(tape.moments())
    for one, other in zip(*([m.sign_sum, m.mean, m.m2] for m in found), strict=True):
        assert torch.equal(one, other)


def test_a_parameter_used_twice_or_elsewhere_is_refused() -> None:
    own = layer("cpu")
    slots = [Slot("weight", torch.Size((OUT, IN)), OUT * IN), Slot("bias", torch.Size((OUT,)), OUT)]

    def twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with MomentTape(slots, K, E, x).watch({"weight": weight, "bias": bias}):
            return dense(x, weight, bias) + dense(x, weight, bias)

    def elsewhere(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with MomentTape(slots, K, E, x).watch({"weight": weight, "bias": bias}):
            return dense(x, weight, bias) + weight.sum()

    for use in (twice, elsewhere):
        with pytest.raises(UnsupportedError):
            vmap(use)(own["x"], own["weight"], own["bias"])


@on_devices
def test_adam_of_k_runs_with_numbers_of_their_own(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    params, gradient, mean = (torch.randn(K, 2000, generator=generator).to(device) for _ in range(3))
    state = AdamState(mean, mean.square(), torch.tensor([0.0, 3.0, 100.0], device=device))
    lr, decay = torch.tensor([0.1, 0.01, 1e-4], device=device), torch.tensor([0.0, 0.1, 1e-3], device=device)
    together = vmap(adam_step)(params, gradient, state, lr, decay)
    for k in range(K):
        own = (params[k].cpu(), gradient[k].cpu(), AdamState(*(field[k].cpu() for field in state)))
        alone, alone_state = adam_step(*own, lr[k].cpu(), decay[k].cpu())
        torch.testing.assert_close(together[0][k].cpu(), alone, rtol=1e-5, atol=1e-6)
        for field, other in zip(together[1], alone_state, strict=True):
            torch.testing.assert_close(field[k].cpu(), other, rtol=1e-5, atol=1e-7)
    assert adam_init(params[0]).count == 0


@on_devices
@pytest.mark.parametrize("kind", ["and", "sand", "released"])
def test_masks_of_k_runs_with_numbers_of_their_own(device: str, kind: str) -> None:
    gradients = torch.randn(E, K, 3000, generator=torch.Generator().manual_seed(2)).to(device)
    moments = gradient_moments(gradients)
    tau = torch.tensor([0.0, 0.4, 0.9], device=device)
    gain = torch.tensor([0.1, 10.0, 1e4], device=device)

    def mask(tau: Tensor, gain: Tensor) -> Mask:
        if kind == "and":
            return ANDMask(tau)
        return SANDMask(tau) if kind == "sand" else SANDMask(tau, dispersion="absolute", gain=gain)

    def weigh(sign_sum: Tensor, mean: Tensor, m2: Tensor, tau: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        return mask(tau, gain).weigh(TensorMoments(E, sign_sum, mean, m2))

    weights, masked = vmap(weigh)(moments.sign_sum, moments.mean, moments.m2, tau, gain)
    for k in range(K):
        own = TensorMoments(E, *(field[k].cpu() for field in (moments.sign_sum, moments.mean, moments.m2)))
        expected = mask(tau[k].cpu(), gain[k].cpu()).element_weights(own)
        torch.testing.assert_close(weights[k].cpu(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(masked[k].cpu(), expected * own.mean, rtol=1e-5, atol=1e-6)
    assert 0 < weights[1].mean() < 1


def test_a_layer_saturates_in_evaluation_as_in_training() -> None:
    x, weight, bias = torch.full((2, 3, 4), 300.0), torch.full((2, 5, 4), 300.0), torch.zeros(2, 5)
    low_x, low_weight, low_bias = (tensor.to(torch.float16) for tensor in (x, weight, bias))
    trained, evaluated = layer_of_runs(low_x, low_weight, low_bias), vmap(dense)(low_x, low_weight, low_bias)
    assert torch.equal(trained, evaluated)
    assert (evaluated == torch.finfo(torch.float16).max).all()
    assert torch.equal(dense(low_x[0], low_weight[0], low_bias[0]), evaluated[0])
    assert (vmap(dense)(x, weight, bias) == 360_000).all()


def test_what_is_no_number_stays_visible_in_float16() -> None:
    x = torch.full((1, 4), torch.nan, dtype=torch.float16)
    assert dense(x, torch.ones(2, 4, dtype=torch.float16), torch.zeros(2, dtype=torch.float16)).isnan().all()


ROWS = random.keys(random.key_of(0), 400)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_units_are_dropped_at_the_rate_and_the_rest_scaled(rate: float) -> None:
    x = torch.rand(400, 100) + 0.5
    out = Dropout(torch.tensor(rate), ROWS)(x, 0)
    dropped = out == 0
    assert dropped.double().mean().item() == pytest.approx(rate, abs=5 * math.sqrt(0.25 / 40_000))
    torch.testing.assert_close(out[~dropped], x[~dropped] / (1 - rate))


def test_the_noise_follows_the_example_wherever_it_stands() -> None:
    x, rate = torch.rand(400, 10), torch.tensor(0.5)
    order = torch.randperm(400)
    out = Dropout(rate, ROWS)(x, 1)
    assert torch.equal(Dropout(rate, ROWS[order])(x[order], 1), out[order])
    assert torch.equal(Dropout(rate, ROWS[3:9])(x[3:9], 1), out[3:9])


def test_a_wider_layer_keeps_the_noise_of_its_first_units() -> None:
    x, drop = torch.rand(400, 12), Dropout(torch.tensor(0.5), ROWS)
    assert torch.equal(drop(x, 0)[:, :7], drop(x[:, :7], 0))


def test_examples_units_and_sites_have_noise_of_their_own() -> None:
    x, drop = torch.ones(400, 64), Dropout(torch.tensor(0.5), ROWS)
    one, two = (drop(x, site) == 0 for site in (0, 1))
    for a, b in ((one, two), (one[:-1], one[1:]), (one[:, :-1], one[:, 1:])):
        same = (a == b).double().mean().item()
        assert same == pytest.approx(0.5, abs=5 * math.sqrt(0.25 / a.numel()))


def test_stacked_runs_have_rates_of_their_own() -> None:
    rates, rows, x = torch.tensor([0.0, 0.1, 0.5]), random.keys(random.key_of(1), 3, 8), torch.rand(3, 8, 5)
    together = vmap(lambda rate, rows, x: Dropout(rate, rows)(x, 2))(rates, rows, x)
    for k in range(3):
        assert torch.equal(together[k], Dropout(rates[k], rows[k])(x[k], 2))
