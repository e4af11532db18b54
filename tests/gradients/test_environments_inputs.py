"""Losses, batches and models that gradients of environments are taken of, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.gradients import environment_gradients, environment_moments
from sandmask.masks import GradientMoments, MaskError


def make_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(n, 6), torch.randint(0, 3, (n,))) for n in (4, 5, 4)]


@pytest.mark.parametrize("method", ["loop", "batched", "auto"])
def test_an_error_names_the_environment_by_its_number(method: Any) -> None:
    batches = make_batches()
    batches[1][0][0, 0] = torch.nan
    for chunk_size in (None, 1, 2):
        with pytest.raises(MaskError, match="in environment 1 should be finite"):
            environment_moments(nn.Linear(6, 3), F.cross_entropy, batches, method, chunk_size=chunk_size)


def test_stacks_are_numbered_on() -> None:
    moments = GradientMoments.of_gradients(torch.ones(3, 2))
    with pytest.raises(MaskError, match="in environment 4 should be finite"):
        moments.update_many(torch.tensor([[1.0, 1.0], [torch.inf, 1.0]]))


@pytest.mark.parametrize("method", ["loop", "auto"])
def test_a_model_without_a_parameter_to_train_is_a_mistake(method: Any) -> None:
    with pytest.raises(MaskError, match="all are frozen"):
        environment_gradients(nn.Linear(6, 3).requires_grad_(False), F.cross_entropy, make_batches(), method)


@pytest.mark.parametrize("method", ["loop", "batched", "auto"])
@pytest.mark.parametrize("per_sample", [False, True])
class TestLosses:
    def test_of_one_element(self, method: Any, per_sample: bool) -> None:
        model, batches = nn.Linear(6, 3), make_batches()
        found = [
            environment_gradients(model, loss, batches, method, per_sample=per_sample)["weight"]
            for loss in (F.cross_entropy, lambda logits, y: F.cross_entropy(logits, y)[None])
        ]
        torch.testing.assert_close(*found)

    def test_that_are_no_losses(self, method: Any, per_sample: bool) -> None:
        model, batches = nn.Linear(6, 3), make_batches()
        wrong: dict[str, Callable[..., Any]] = {
            "should be a scalar": lambda logits, _: logits.mean(0),
            "should depend on a parameter": lambda logits, _: logits.detach().sum(),
            "should be a tensor. Found float": lambda *_: 1.0,
        }
        for message, loss in wrong.items():
            with pytest.raises(MaskError, match=message):
                environment_moments(model, loss, batches, method, per_sample=per_sample)

    def test_where_gradients_are_off(self, method: Any, per_sample: bool) -> None:
        model, batches = nn.Linear(6, 3), make_batches()
        expected = environment_gradients(model, F.cross_entropy, batches, "loop", per_sample=per_sample)
        with torch.no_grad():
            found = environment_gradients(model, F.cross_entropy, batches, method, per_sample=per_sample)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_batches_may_come_from_anywhere() -> None:
    model, batches = nn.Linear(6, 3), make_batches()
    expected = environment_gradients(model, F.cross_entropy, batches)
    torch.testing.assert_close(environment_gradients(model, F.cross_entropy, iter(batches)), expected)
    torch.testing.assert_close(environment_gradients(model, F.cross_entropy, map(list, batches)), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.ones(2, 6), torch.ones(2), 0), "pairs"),
        ({"x": torch.ones(2, 6), "y": torch.ones(2)}, "pairs"),
        (({"ids": torch.ones(2, 6)}, torch.ones(2)), "pairs"),
        ((torch.ones(2, 6), torch.ones(())), "equally many inputs and targets"),
    ],
)
def test_batches_that_are_no_pairs(batch: Any, message: str) -> None:
    with pytest.raises(MaskError, match=message):
        environment_moments(nn.Linear(6, 3), F.cross_entropy, [*make_batches(), batch])


def test_a_function_is_no_model() -> None:
    with pytest.raises(MaskError, match="Found function"):
        environment_moments(lambda x: x, F.cross_entropy, make_batches())  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["loop", "auto"])
def test_sparse_gradients_are_refused_with_advice(method: Any) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 3, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.table(x).mean(1)
            return found

    batches = [(torch.randint(9, (4, 2)), torch.randint(0, 3, (4,))) for _ in range(2)]
    with pytest.raises(MaskError, match=r"`table\.weight` should be dense"):
        environment_gradients(Bag(), F.cross_entropy, batches, method)
