"""Steps of a stack of MLPs with kernels, against the same steps without.

On a GPU, or in a process with TRITON_INTERPRET=1, where Triton's interpreter runs the kernels on the CPU.
"""

import importlib
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from sandmask._physical import reachable
from sandmask.datasets import DATASETS, load_dataset
from sandmask.functional import adam, dense, head, random, rescaling
from sandmask.functional.kernels import dense as dense_kernels
from sandmask.functional.kernels import head as head_kernels
from sandmask.functional.kernels import random as random_kernels
from sandmask.functional.kernels import rescaling as rescaling_kernels
from sandmask.functional.kernels import running_means as mean_kernels
from sandmask.functional.tape import layers, moment_tape
from sandmask.masks import _base as masks
from sandmask.masks import _gpu as mask_kernels
from sandmask.masks import _triton as triton_masks
from sandmask.masks import gradient_moments, moments_of_parts
from sandmask.training import Stack, averaging, make_spec, set_precision

shared = importlib.import_module("conv_kernel_checks")
DEVICE, INTERPRETED = shared.DEVICE, shared.INTERPRETED
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: kernels may divide by zero
MODULES = (adam, averaging, dense, head, masks, random, rescaling, layers, moment_tape)


def use_kernels(patch: pytest.MonkeyPatch, *, wanted: bool) -> None:
    def has_kernels(tensor: Tensor) -> bool:
        return wanted and tensor.device.type == DEVICE.type and tensor.dtype != torch.float64 and reachable()

    for module in MODULES:
        patch.setattr(module, "has_kernels", has_kernels)


def trained(patch: pytest.MonkeyPatch, algorithm: str, precision: str, dropout: float) -> tuple[Tensor, ...]:
    """Losses, parameters, right answers and means of two runs after some steps; widths that are no multiples of 16."""
    width = 33 if precision == "fp32x3" else 21  # halves are for wide layers
    hparams = {"batch_size": 6, "mlp_width": width, "lr": 0.01, "dropout": dropout}
    hparams |= {"tau": 0.5} if "Mask" in algorithm else {}
    entry = DATASETS["DebugVector"]
    specs = [
        make_spec(
            entry,
            algorithm,
            [0],
            steps=3,
            hparams=hparams,
            seed=k,
            precision=precision,
            averages=("sma", "ema", "swad"),
        )
        for k in (0, 1)
    ]
    set_precision(precision)
    stack = Stack(specs, load_dataset("DebugVector"), DEVICE)
    patch.setattr(stack.algorithm, "step", None)  # the step of one run, which is the fallback
    state, losses = stack.init(), []
    for batch in stack.feed(0):
        state, metrics = stack.step(state, batch)
        losses.append(metrics["loss"])
    means = torch.stack([state["averages"][name]["weights"]["params"] for name in ("sma", "ema")])
    return torch.stack(losses), state["params"], stack.tally(state).right, means


@pytest.mark.parametrize(
    ("algorithm", "precision", "dropout"),
    [
        ("ERM", "fp32", 0.5),
        ("ANDMask", "fp32", 0.0),
        ("SANDMask", "fp32", 0.5),
        ("SANDMask-released", "fp32", 0.0),
        ("SANDMask-rescaled", "fp32", 0.0),
        ("SANDMask", "fp16", 0.0),
        ("ERM", "fp32x3", 0.5),
        ("SANDMask", "fp32x3", 0.5),
    ],
)
def test_a_stack_with_kernels_trains_as_without(
    algorithm: str, precision: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(monkeypatch, wanted=False)
    plain = trained(monkeypatch, algorithm, precision, dropout)
    use_kernels(monkeypatch, wanted=True)
    fast = trained(monkeypatch, algorithm, precision, dropout)
    tolerance = 1e-2 if precision == "fp16" else 1e-4
    torch.testing.assert_close(fast[0], plain[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(fast[1], plain[1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(fast[3], plain[3], rtol=tolerance, atol=tolerance)
    if precision != "fp16":
        assert torch.equal(fast[2], plain[2])


def test_runs_that_evaluate_different_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit, parts of the stack are evaluated by themselves, down to a single run."""
    entry, hparams = DATASETS["DebugVector"], {"batch_size": 6, "mlp_width": 33}
    specs = [make_spec(entry, "ERM", [k], steps=1, hparams=hparams, seed=k, precision="fp32x3") for k in range(3)]
    set_precision("fp32x3")
    stack = Stack(specs, load_dataset("DebugVector"), DEVICE, train_eval_limit=5)
    state, predict = stack.init(), stack.lift(stack.algorithm.predict, (0, None))
    use_kernels(monkeypatch, wanted=False)
    plain = stack.evaluator.alone(predict, state)
    use_kernels(monkeypatch, wanted=True)
    fast = stack.evaluator.alone(predict, state)
    assert torch.equal(fast.right, plain.right)
    torch.testing.assert_close(fast.loss, plain.loss, rtol=1e-5, atol=1e-5)


def test_keys_and_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.stack([random.key_of(seed) for seed in range(5)]).to(DEVICE)
    use_kernels(monkeypatch, wanted=False)
    for data in (0, 1, 12345, torch.arange(4, device=DEVICE).unsqueeze(1)):
        assert torch.equal(random_kernels.fold(keys, data), random.fold(keys, data))
    wide = torch.arange(15, device=DEVICE).view(5, 3)
    wanted = [random.fold(keys, 7), random.fold(keys.unsqueeze(1), wide), random.fold(keys.unsqueeze(1), wide[0])]
    use_kernels(monkeypatch, wanted=True)
    assert torch.equal(vmap(lambda key: random.fold(key, 7))(keys), wanted[0])
    assert torch.equal(vmap(random.fold)(keys, wide), wanted[1])
    assert torch.equal(vmap(random.fold, in_dims=(0, None))(keys, wide[0]), wanted[2])
    flat = torch.randn(2, 500, device=DEVICE)
    matrices = flat[:, 10 : 10 + 22 * 18].view(2, 22, 18)
    assert torch.equal(dense_kernels.pad(matrices, 24, 24), torch.nn.functional.pad(matrices, (0, 6, 0, 2)))


def test_adam_on_parts_of_longer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    params, gradient = (torch.randn(2, 1500, device=DEVICE)[:, 100:1300] for _ in range(2))
    means, squares = torch.rand(2, 2, 1200, device=DEVICE)
    state = adam.AdamState(means, squares, torch.ones(2, device=DEVICE))
    use_kernels(monkeypatch, wanted=True)
    found, wanted = (
        vmap(partial(step, lr=0.1, weight_decay=0.01))(params, gradient, state)
        for step in (adam.adam_step, adam.plain_adam_step)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("n_means", "n_iterates"), [(1, 1), (1, 2), (2, 1), (3, 2), (4, 3)])
def test_means_follow_iterates(n_means: int, n_iterates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every number of means and iterates, also more than one pass takes, with shares from none to all."""
    shape = (2, 3, mean_kernels.BLOCK // 2)  # whose last block is half full
    means, iterates = ([torch.randn(shape, device=DEVICE) for _ in range(n)] for n in (n_means, n_iterates))
    shares = torch.rand(n_means, n_iterates, 2, device=DEVICE)
    shares[0, 0] = torch.tensor([0.0, 1.0])
    found = mean_kernels.follow(means, iterates, shares)
    torch.testing.assert_close(found, averaging.plain_follow(means, iterates, shares))
    assert n_iterates > 1 or torch.equal(found[0], torch.stack([means[0][0], iterates[0][1]]))


def test_moments_of_parts_are_written_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gradients of two precisions, whose sizes are no multiples of what a kernel reads at a time."""
    grads = torch.randn(3, 2501, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    parts = [grads[:, :1500].half(), grads[:, 1500:].contiguous()]
    plain = moments_of_parts([part.float() for part in parts]) if INTERPRETED else None
    monkeypatch.setattr(mask_kernels, "kernels", lambda _: triton_masks)
    found = moments_of_parts(parts)
    expected = plain or gradient_moments(torch.cat([part.float() for part in parts], 1))
    for name in ("sign_sum", "mean", "m2"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rescaled", [None, 0.0, 1.0])
def test_masked_gradients_are_divided_tensor_by_tensor(rescaled: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors of one element, of one tile and of many; masks that are zero, and numbers that become too large."""
    monkeypatch.setattr(rescaling_kernels, "BLOCK", 2)
    tile = rescaling_kernels.TILE
    sizes = [1, tile, 7, 5 * tile + 3, 2 * tile, 1, 20]
    generator = torch.Generator().manual_seed(0)
    masked, weights = (torch.rand(2, sum(sizes), generator=generator).to(DEVICE) for _ in range(2))
    masked -= 0.5
    weights[1, -21] = 0.0  # the whole mask of a tensor
    weights[0, -20:] = 1e-12
    masked[0, -20:-17] = torch.tensor([1e30, -1e30, torch.nan], device=DEVICE)
    wanted = None if rescaled is None else torch.tensor([1.0, rescaled], device=DEVICE)
    found = {}
    for kernels in (False, True):
        use_kernels(monkeypatch, wanted=kernels)
        dims = (0, 0, None if wanted is None else 0)
        of_runs = torch.func.vmap(lambda m, w, on: rescaling.rescale_tensors(m, w, sizes, on), in_dims=dims)
        found[kernels] = of_runs(masked, weights, wanted)
        alone = rescaling.rescale_tensors(masked[1], weights[1], sizes, None if wanted is None else wanted[1])
        torch.testing.assert_close(alone, found[kernels][1])
    torch.testing.assert_close(found[True], found[False], rtol=1e-5, atol=0.0, equal_nan=True)
    largest = torch.finfo(torch.float32).max
    assert found[True][0, -20:-18].tolist() == [largest, -largest]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(5, 18, 2), (70, 130, 11)])
def test_a_classifier_and_its_gradients(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features that are wider than the weights, of a lower precision, in parts that do not divide the rows."""
    torch.set_float32_matmul_precision("highest")
    n_rows, n_in, n_classes = shape
    x, weight, bias = (
        torch.randn(2, *size, device=DEVICE) for size in ((n_rows, n_in), (n_classes, n_in), (n_classes,))
    )
    wide = torch.nn.functional.pad(x, (0, 14)).to(dtype)
    exact = wide[..., :n_in].float().requires_grad_()
    own = weight.clone().requires_grad_()
    expected = exact @ own.mT + bias.unsqueeze(1)
    grad = torch.randn_like(expected)
    of_x, of_weight = torch.autograd.grad(expected, (exact, own), grad)
    torch.testing.assert_close(head_kernels.logits(wide, weight, bias), expected.detach(), rtol=1e-4, atol=1e-4)
    found, sums = head_kernels.gradients(grad, wide, weight, 16)
    rounding = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found[..., :n_in].float(), of_x, rtol=rounding, atol=rounding)
    assert found[..., n_in:].abs().sum() == 0
    assert sums.shape[1] == -(-n_rows // 16)
    torch.testing.assert_close(sums.sum(1), of_weight, rtol=1e-3, atol=1e-3)


def test_units_beyond_the_range_of_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay at its largest number, with and without kernels; what is no number stays visible."""
    largest = torch.finfo(torch.float16).max
    x = torch.full((1, 16, 16), 2000.0, dtype=torch.float16, device=DEVICE)
    x[0, 1, 0] = torch.nan
    weight = torch.full((1, 16, 16), 10.0, dtype=torch.float16, device=DEVICE)
    bias = torch.zeros(1, 16, dtype=torch.float16, device=DEVICE)
    exact, zero = torch.ones(1, 2, 16, device=DEVICE), torch.zeros(1, 2, device=DEVICE)
    for wanted in (False, True):
        use_kernels(monkeypatch, wanted=wanted)
        y = dense.layer_of_runs(x, weight, bias)
        assert (y[0, 0] == largest).all()
        assert y[0, 1].isnan().all()
        before, sums = dense.layer_backward(
            torch.full_like(y, torch.inf), y[:, :1].expand_as(y).contiguous(), None, None
        )
        assert (before == largest).all()
        assert sums.isfinite().all()
    logits = head_kernels.logits(torch.full_like(y, torch.inf), exact, zero)
    torch.testing.assert_close(logits, torch.full_like(logits, 16 * largest))
    of_x, _ = head_kernels.gradients(torch.full_like(logits, 1e30), torch.ones_like(y), exact, 16)
    assert (of_x == largest).all()
