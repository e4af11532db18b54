"""Loss functions that are called once for all environments, against a call for each of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.gradients import environment_gradients, environment_moments
from sandmask.gradients._losses import joined_targets

LossFunction = Callable[..., Tensor]
Batches = list[tuple[Tensor, Tensor]]


def classes(n: int) -> Tensor:
    return torch.randint(0, 3, (n,))


def shares(n: int) -> Tensor:
    return torch.rand(n, 3).softmax(1)


def some_ignored(n: int) -> Tensor:
    return torch.tensor([-100, 0, 2] * n)[:n]


CASES: dict[str, tuple[LossFunction, Callable[[int], Tensor]]] = {
    "classes": (F.cross_entropy, classes),
    "ignored classes": (F.cross_entropy, some_ignored),
    "shares": (F.cross_entropy, shares),
    "squares": (F.mse_loss, shares),
    "logits": (F.binary_cross_entropy_with_logits, shares),
    "another function": (F.l1_loss, shares),
}


def draw(targets: Callable[[int], Tensor], sizes: list[int]) -> Batches:
    return [(torch.randn(n, 4), targets(n)) for n in sizes]


@pytest.mark.parametrize("sizes", [[5, 5, 5], [6, 4, 5]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_a_call_for_each_environment(case: str, sizes: list[int]) -> None:
    loss_fn, targets = CASES[case]
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), draw(targets, sizes)
    expected = environment_gradients(model, loss_fn, batches, "loop")
    environment_moments(model, loss_fn, batches)  # the first pass needs the loss of an environment
    torch.testing.assert_close(environment_gradients(model, loss_fn, batches), expected)
    moments = environment_moments(model, loss_fn, batches)
    torch.testing.assert_close(moments.mean, {name: grads.mean(0) for name, grads in expected.items()})


def test_losses_that_are_joined() -> None:
    for case in ("classes", "shares", "squares", "logits"):
        loss_fn, targets = CASES[case]
        y = [targets(4), targets(4)]
        joined = joined_targets(loss_fn, torch.randn(8, 3), y)
        assert joined is not None
        assert torch.equal(joined, torch.cat(y))


def test_losses_that_are_not_joined() -> None:
    output = torch.randn(8, 3)
    ignored = torch.tensor([0, 1, 2, -100])
    assert joined_targets(nn.CrossEntropyLoss(), output, [classes(4), classes(4)]) is None
    assert joined_targets(F.nll_loss, output, [classes(4), classes(4)]) is None
    assert joined_targets(F.cross_entropy, output, [classes(5), classes(3)]) is None
    assert joined_targets(F.cross_entropy, output, [classes(4), ignored]) is None
    assert joined_targets(F.mse_loss, output, [torch.randn(4, 1), torch.randn(4, 1)]) is None
    assert joined_targets(F.mse_loss, output, [shares(4).double(), shares(4).double()]) is None


def test_a_function_in_torchs_place_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "cross_entropy", lambda output, y: output.sum() * y.sum())
    assert joined_targets(F.cross_entropy, torch.randn(8, 3), [classes(4), classes(4)]) is None
