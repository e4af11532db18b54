"""`sandmask.backward` against per-environment gradients taken one by one and masked as stacks."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import sandmask
from sandmask.gradients._losses import Losses
from sandmask.masks import ANDMask, GeometricMean, Mask, SANDMask

MASKS = [ANDMask(1.0), SANDMask(0.2), SANDMask(0.2, dispersion="absolute"), GeometricMean(0.5, rescale="sparsity")]
Batches = list[tuple[Tensor, Tensor]]


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batches(envs: int = 4, sizes: tuple[int, ...] = (6, 2, 9, 4)) -> Batches:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(sizes[e % len(sizes)], 5, generator=generator),
            torch.randint(3, (sizes[e % len(sizes)],), generator=generator),
        )
        for e in range(envs)
    ]


def losses_of(model: nn.Module, batches: Batches) -> Iterator[Tensor]:
    return (nn.functional.cross_entropy(model(x), y) for x, y in batches)


def expected_gradients(model: nn.Module, batches: Batches, mask: Mask) -> list[Tensor]:
    """The obvious way: keep all gradients, stack, mask."""
    each = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses_of(model, batches)]
    return mask([torch.stack(grads) for grads in zip(*each, strict=True)])


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


FORMS: dict[str, Callable[[Iterator[Tensor]], Losses]] = {
    "generator": lambda losses: losses,
    "list": list,
    "tuple": tuple,
    "tensor": lambda losses: torch.stack(list(losses)),
    "one-element losses": lambda losses: [loss[None] for loss in losses],
    "lists of one": lambda losses: [[loss] for loss in losses],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_every_form_of_losses_gives_the_masked_gradient(mask: Mask, form: str) -> None:
    model, batches = make_model(), make_batches()
    sandmask.backward(FORMS[form](losses_of(model, batches)), model.parameters(), mask)
    torch.testing.assert_close(gradients(model), expected_gradients(model, batches, mask))


def test_and_mask_with_tau_0_is_plain_backward() -> None:
    model, plain, batches = make_model(), make_model(), make_batches()
    sandmask.backward(losses_of(model, batches), model.parameters(), ANDMask(0.0))
    torch.stack(list(losses_of(plain, batches))).mean().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_gradients_accumulate() -> None:
    model, batches = make_model(), make_batches()
    for _ in range(2):
        sandmask.backward(losses_of(model, batches), model.parameters(), SANDMask(0.1))
    expected = [2 * grad for grad in expected_gradients(model, batches, SANDMask(0.1))]
    torch.testing.assert_close(gradients(model), expected)


def test_losses_may_share_a_graph() -> None:
    model, batches = make_model(), make_batches(3, sizes=(4,))
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    losses = nn.functional.cross_entropy(model(x), y, reduction="none").view(3, 4).mean(1)
    sandmask.backward(losses, model.parameters(), SANDMask(0.1))
    torch.testing.assert_close(gradients(model), expected_gradients(model, batches, SANDMask(0.1)))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        losses.sum().backward()  # type: ignore[no-untyped-call]  # freed, as after Tensor.backward


def test_unused_parameters() -> None:
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    sandmask.backward([(a * 2).sum(), (a + b).sum()], [a, b, c], ANDMask(0.5))
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.tolist() == [1.5, 1.5]
    assert b.grad.tolist() == [0.5, 0.5]  # zero in the first environment
    assert c.grad is None
    existing = c.grad = torch.ones(2)
    sandmask.backward([a.sum(), a.sum()], [a, c], ANDMask(0.5))
    assert c.grad is existing


def test_shared_parameters_count_once() -> None:
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    report = sandmask.backward([(w * w).sum(), w[0] - w[1]], [("a", w), ("b", w)], ANDMask(0.0))
    assert w.grad is not None
    assert w.grad.tolist() == [1.5, -2.5]
    assert list(report.per_tensor) == ["a"]


def test_frozen_parameters_are_left_alone() -> None:
    model, batches = make_model(), make_batches()
    model[0].requires_grad_(False)
    report = sandmask.backward(losses_of(model, batches), model.named_parameters(), ANDMask(0.0))
    assert all(p.grad is None for p in model[0].parameters())
    assert list(report.per_tensor) == ["2.weight", "2.bias"]


def test_parameters_of_several_dtypes() -> None:
    params = [
        torch.ones(3, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ]
    scale = torch.tensor([1.0, 2.0, -3.0])
    losses = [sum(((p * k * scale.to(p.dtype)).sum().double() for p in params), torch.zeros(())) for k in (1, 3)]
    sandmask.backward(losses, params, ANDMask(1.0))
    for p in params:
        assert p.grad is not None
        assert p.grad.dtype == p.dtype
        assert p.grad.tolist() == [2, 4, -6]


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="needs a torch with `Tensor.grad_dtype`")
def test_gradients_may_be_wider_than_their_parameters() -> None:
    w = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    w.grad_dtype = torch.float32
    for times in (1, 2):
        sandmask.backward([(w * k).sum() for k in (1, 3)], [w], ANDMask(1.0))
        torch.testing.assert_close(w.grad, torch.full((3,), 2.0 * times))


def test_gradients_that_share_memory_are_not_mixed_up() -> None:
    # The gradients of a and b are one and the same expanded tensor.
    a, b = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    micro_batches = [[(a + b).sum(), (a + b).sum(), (a + b).sum()], [(a - b).sum(), (a + b).sum()]]
    sandmask.backward(micro_batches, [a, b], ANDMask(0.0))
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.tolist() == [2.5] * 3
    assert b.grad.tolist() == [1.5] * 3


@pytest.mark.parametrize("lazily", [True, False])
def test_micro_batches_add_up_to_their_environment(lazily: bool) -> None:
    model, batches = make_model(), make_batches(3, sizes=(6, 3, 9))

    def pieces(x: Tensor, y: Tensor) -> Iterator[Tensor]:
        parts = list(zip(torch.split(x, 3), torch.split(y, 3), strict=True))
        return (nn.functional.cross_entropy(model(x), y) / len(parts) for x, y in parts)

    lazy = (pieces(x, y) for x, y in batches)
    sandmask.backward(lazy if lazily else [list(part) for part in lazy], model.parameters(), SANDMask(0.1))
    torch.testing.assert_close(gradients(model), expected_gradients(model, batches, SANDMask(0.1)))


def test_training_goes_down() -> None:
    torch.manual_seed(0)
    model, batches = make_model(), make_batches(2, sizes=(32,))
    batches = [(x, (x[:, 0] > 0).long()) for x, _ in batches]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    first = sum(loss.item() for loss in losses_of(model, batches))
    for _ in range(30):
        optimizer.zero_grad()
        sandmask.backward(losses_of(model, batches), model.parameters(), ANDMask(1.0))
        optimizer.step()
    assert sum(loss.item() for loss in losses_of(model, batches)) < first / 2


class _Saved:
    """Counts what autograd keeps for the backward pass."""

    live = 0
    most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        _Saved.live += 1
        _Saved.most = max(_Saved.most, _Saved.live)

    def __del__(self) -> None:
        _Saved.live -= 1


def most_saved(envs: int, form: Callable[[Iterator[Tensor]], Losses]) -> int:
    model, batches = make_model(), make_batches(envs)
    _Saved.live = _Saved.most = 0
    with torch.autograd.graph.saved_tensors_hooks(_Saved, lambda saved: saved.tensor):
        sandmask.backward(form(losses_of(model, batches)), model.parameters(), ANDMask(1.0))
    return _Saved.most


def test_a_generator_keeps_one_graph_whatever_the_number_of_environments() -> None:
    one_graph = most_saved(2, lambda losses: losses)
    assert most_saved(10, lambda losses: losses) == one_graph
    assert most_saved(10, lambda losses: ([loss] for loss in losses)) == one_graph
    assert most_saved(10, list) == 10 * one_graph


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_parameters_on_several_devices(mask: Mask) -> None:
    model, reference, batches = make_model(), make_model(), make_batches()
    model[0].cuda()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model[2](model[1](model[0](x.cuda())).cpu()), y)

    report = sandmask.backward((loss_of(x, y) for x, y in batches), model.parameters(), mask)
    found = [grad.cpu() for grad in gradients(model)]
    torch.testing.assert_close(found, expected_gradients(reference, batches, mask), rtol=1e-3, atol=1e-5)
    assert len(report.per_tensor) == 4


def test_micro_batches_that_begin_to_use_a_parameter_late() -> None:
    """Two parameters that are added have one gradient in memory, and that of a sum is one number: neither is ours."""
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    x = torch.tensor([1.0, 2.0])

    def parts() -> list[Tensor]:
        return [(c * x).sum(), ((a + b) * x).sum(), ((a + b) * x).sum() + c.sum(), a.sum(), a.sum()]

    sandmask.backward([parts(), parts()], [a, b, c], ANDMask(0.0))
    expected = {"a": 2 * x + 2, "b": 2 * x, "c": x + 1}
    for param, wanted in zip((a, b, c), expected.values(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad, wanted)


def test_micro_batches_whose_gradient_is_one_number_in_memory() -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    sandmask.backward([[b.sum(), a.sum(), a.sum()] for _ in range(2)], [a, b], ANDMask(0.0))
    assert a.grad is not None
    assert a.grad.tolist() == [2.0, 2.0]
