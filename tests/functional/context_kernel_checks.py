"""The convolutions of ARM's context network by kernels for K runs, against plain operations one run after the other.

On a GPU, or in a process with TRITON_INTERPRET=1, where Triton's interpreter runs the kernels on the CPU.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from sandmask._physical import reachable
from sandmask.functional import context_conv, conv
from sandmask.functional.context_conv import convolution, has_context_kernels, normed_block, plain_normed_block
from sandmask.functional.kernels import conv as conv_kernels
from sandmask.functional.kernels import conv_weights, norm
from sandmask.networks import small
from sandmask.training import Stack, stack
from sandmask.training.precision import set_precision, temporary_precision

shared = importlib.import_module("conv_kernel_checks")
DEVICE, K = shared.DEVICE, shared.K


@pytest.fixture(autouse=True)
def kernels_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (context_conv, conv, small):
        monkeypatch.setattr(module, "kernels_suit", lambda: True)
    set_precision("fp32")
    for module in (context_conv, conv, stack) if shared.INTERPRETED else ():
        monkeypatch.setattr(module, "has_kernels", lambda tensor: tensor.dtype != torch.float64 and reachable())


@dataclass(frozen=True)
class Case:
    """A layer, and the images it is given."""

    n_samples: int
    n_in: int
    n_out: int
    height: int
    width: int
    side: int
    dtype: torch.dtype = torch.float32

    def tensors(self) -> list[Tensor]:
        """x and the parameters, of K runs."""
        generator = torch.Generator().manual_seed(0)
        weight = (self.n_out, self.n_in, self.side, self.side)
        shapes = [(self.n_samples, self.n_in, self.height, self.width), weight, *[(self.n_out,)] * 3]
        made = [torch.randn(K, *shape, generator=generator) for shape in shapes]
        made[1] /= self.side * self.n_in**0.5
        return [tensor.to(DEVICE, self.dtype).requires_grad_() for tensor in made]


def assert_alike(
    case: Case, found: Callable[..., Tensor], wanted: Callable[..., Tensor], tensors: list[Tensor]
) -> None:
    """Results and gradients of K runs, against those of one run after the other in float64."""
    own = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact = torch.stack([wanted(k, *(tensor[k] for tensor in own)) for k in range(K)])
    along = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    y = vmap(found)(torch.arange(K, device=DEVICE), *tensors)
    assert y.dtype == case.dtype
    gradients = torch.autograd.grad((exact * along).sum(), own)
    by_kernels = torch.autograd.grad((y * along).sum(), tensors)
    if case.dtype == torch.float32:
        shared.assert_near(y, exact, 1e-5)
        for one, other in zip(by_kernels, gradients, strict=True):
            shared.assert_near(one, other, 2e-5)
        return
    # Half precision rounds some of the ReLU's inputs to the other side of zero, where gradients are others one by one.
    for one, other in zip((y, *by_kernels), (exact, *gradients), strict=True):
        assert (one.double() - other).norm() <= 6e-2 * other.norm()


def block_by(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A block as a function of a run's number, which it does not need, and its tensors."""
    return lambda _, *own: block(*own, groups=8)


BLOCKS = [
    Case(6, 2, 16, 6, 7, 5),
    Case(4, 1, 32, 7, 5, 5),
    Case(4, 16, 16, 4, 6, 5),
    Case(2, 32, 32, 5, 4, 3),
    Case(2, 3, 16, 3, 9, 7),
    Case(4, 16, 32, 6, 6, 5, torch.bfloat16),
]


@pytest.mark.parametrize("case", BLOCKS)
def test_a_block_of_k_runs_and_its_gradients(case: Case) -> None:
    tensors = case.tensors()
    assert has_context_kernels(tensors[0][0], tensors[1][0], 8)
    assert_alike(case, block_by(normed_block), block_by(plain_normed_block), tensors)


@pytest.mark.parametrize("case", [BLOCKS[0], BLOCKS[2], BLOCKS[5]])
def test_means_of_a_block_over_environments(case: Case) -> None:
    share = torch.rand(K, 2, case.n_samples // 2, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    share[0, 1, -1] = 0.0  # padding

    def by(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def found(k: int | Tensor, *own: Tensor) -> Tensor:
            mine = share.index_select(0, torch.as_tensor(k, device=DEVICE).view(1))[0]  # also of a run inside `vmap`
            exact = torch.promote_types(own[0].dtype, torch.float32)
            return block_by(partial(block, share=mine.to(exact)))(k, *own)

        return found

    assert_alike(case, by(normed_block), by(plain_normed_block), case.tensors())


@pytest.mark.parametrize(
    "case", [Case(2, 16, 1, 6, 5, 5), Case(3, 16, 24, 4, 4, 3), Case(2, 32, 1, 6, 5, 5, torch.bfloat16)]
)
def test_a_convolution_of_any_number_of_outputs(case: Case) -> None:
    def plain(_: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias, padding=case.side // 2)

    assert_alike(case, lambda _, *own: convolution(*own), plain, case.tensors()[:3])


@pytest.mark.parametrize(("stride", "n_in"), [(1, 16), (2, 16), (2, 24)])
def test_kernels_of_filters_of_another_side(stride: int, n_in: int) -> None:
    side = 5
    x, weight, bias, *_ = Case(4, n_in, 16, 7, 6, side).tensors()
    wanted = vmap(lambda x, weight, bias: F.conv2d(x, weight, bias, stride, side // 2))(x, weight, bias)
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    images, taps = x.detach().movedim(2, 4).contiguous(), conv_kernels.by_tap(weight.detach())
    found = conv_kernels.convolve(images, taps, bias.detach(), stride, relu=False)
    shared.assert_near(found.movedim(4, 2), wanted, 1e-5)
    of_x, of_weight = torch.autograd.grad((wanted * grad).sum(), (x, weight))
    grad = grad.movedim(2, 4).contiguous()
    found = conv_kernels.input_gradient(grad, taps, stride, x.shape[3:])
    shared.assert_near(found.movedim(4, 2), of_x, 1e-5)
    shared.assert_near(conv_weights.weight_gradient(grad, images, weight, stride), of_weight, 1e-5)
    halves = weight.new_empty(3, K, weight[0].numel())
    conv_weights.weight_moments(grad, images, None, 2, stride, halves, side)
    shared.assert_near(2 * halves[1], of_weight.flatten(1), 1e-5)


@pytest.mark.parametrize("n_in", [16, 24])
def test_weights_of_large_images_are_summed_in_parts(n_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(4, n_in, 32, 9, 7, 3)
    monkeypatch.setattr(conv_weights, "PROGRAMS", 1)
    monkeypatch.setattr(conv_weights, "LONGEST", 126)
    x, weight = (tensor.detach() for tensor in case.tensors()[:2])
    grad = torch.randn(K, 4, 9, 7, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    images = x.movedim(2, 4).contiguous()
    assert conv_weights.weight_parts(grad, images, 1, 1, 3).shape[:3] == (K, 1, 2)
    in_parts = conv_weights.weight_gradient(grad, images, weight, 1)
    monkeypatch.setattr(conv_weights, "LONGEST", 1000)
    assert conv_weights.weight_parts(grad, images, 1, 1, 3).shape[:3] == (K, 1, 1)
    shared.assert_near(in_parts, conv_weights.weight_gradient(grad, images, weight, 1), 1e-6)


@pytest.mark.parametrize(
    ("n_rows", "depth", "programs", "longest", "parts"),
    [
        *((12544, 64, 576, 32768, 1), (12544, 64, 108, 32768, 4), (12544, 64, 18, 32768, 22)),
        *((25088, 64, 144, 32768, 3), (100352, 64, 400, 32768, 4), (100352, 64, 400, 2048, 49)),
        *((100, 64, 1, 32768, 1), (1, 16, 1, 32768, 1)),
    ],
)
def test_there_are_parts_enough_for_a_gpu_and_none_is_short(
    n_rows: int, depth: int, programs: int, longest: int, parts: int
) -> None:
    part = conv_weights._part(n_rows, depth, programs, longest)
    assert part % depth == 0
    assert part <= longest
    assert -(-n_rows // part) == parts


@pytest.mark.parametrize("numbers", [16, 4096])
def test_images_that_are_read_once_or_in_blocks(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setitem(getattr(norm, name), 4, getattr(norm, name)[4]._replace(numbers=numbers))
    shared.test_a_block_of_k_runs_and_its_gradients(shared.CASES[3])


def test_products_of_halves() -> None:
    case = BLOCKS[2]
    with temporary_precision("fp32x3"):
        assert_alike(case, block_by(normed_block), block_by(plain_normed_block), case.tensors())


def test_what_is_no_number_stays_visible() -> None:
    tensors = [tensor.detach() for tensor in BLOCKS[0].tensors()]
    tensors[0][0, 1, 0, 3, 3] = float("nan")
    leaves = [tensor.requires_grad_() for tensor in tensors]
    y = vmap(block_by(normed_block), in_dims=(None, *[0] * 5))(0, *leaves)
    assert y[0, 1].isnan().all()
    assert not y[0, 0].isnan().any()
    assert not y[1].isnan().any()
    for gradient in torch.autograd.grad(y.square().sum(), leaves):
        assert gradient[0].isnan().any()
        assert not gradient[1].isnan().any()


def test_large_images_have_no_kernels() -> None:
    weight = torch.zeros(16, 3, 5, 5, device=DEVICE)
    with temporary_precision("fp32x3"):  # a GPU has no kernels for plain float32
        assert has_context_kernels(torch.zeros(1, 3, 64, 64, device=DEVICE), weight, 8)
        assert not has_context_kernels(torch.zeros(1, 3, 65, 64, device=DEVICE), weight, 8)


def test_stacked_runs_of_arm_equal_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if shared.INTERPRETED:
        shared.large_tiles(monkeypatch)
    together = Stack(shared.specs_of("ARM"), shared.small_images(), DEVICE)
    assert together.stacks
    state, losses, counts = shared.one_step(together)
    for module in (context_conv, conv, stack):
        monkeypatch.setattr(module, "has_kernels", lambda _: False)
    for k, spec in enumerate(shared.specs_of("ARM")):
        alone = Stack([spec], shared.small_images(), torch.device("cpu"))
        own_state, own_losses, own_counts = shared.one_step(alone)
        for adam in ("adam", "context_adam"):
            shared.assert_near(state[adam].mean[k].cpu(), own_state[adam].mean[0], 1e-4)
        torch.testing.assert_close(losses[k], own_losses[0], rtol=1e-5, atol=1e-5)
        assert (counts[k] - own_counts[0]).abs().sum() <= 1  # of 15: a tie may fall to either side
