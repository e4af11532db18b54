"""Environments spread over real processes give the single-process result."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.multiprocessing.spawn import start_processes

import sandmask
from sandmask.gradients import _processes
from sandmask.masks import ANDMask, GeometricMean, GradientMoments, Mask, MaskError, SANDMask
from sandmask.training.processes import leave_group

ENVIRONMENTS = 7
MASKS: list[Mask] = [
    ANDMask(0.4),
    SANDMask(0.1),
    SANDMask(0.1, dispersion="absolute", gain=0.5),
    GeometricMean(0.4, rescale="sparsity"),
]
Gradients = dict[str, Tensor | None]


class Model(nn.Module):
    """The head is used by environments 0 and 3 alone, `nobody` by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.nobody = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(2, 2)

    def loss(self, environment: int) -> Tensor:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(environment))
        features = self.body(x).tanh()
        output: Tensor = self.head(features) if environment in (0, 3) else features
        return output.square().mean()


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters()}


def stacks() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {
        "a": torch.randn(ENVIRONMENTS, 3, 2, generator=generator),
        "b": torch.randn(ENVIRONMENTS, 5, generator=generator).bfloat16(),
        "c": torch.randn(ENVIRONMENTS, 4, generator=generator).double(),
        "huge": torch.tensor([3e38, -3e38, 1.0, 3e38, -2e38, 3e38, 3e38])[:, None],
        "same": torch.full((ENVIRONMENTS, 2), 0.3),
    }


def dealt(rank: int, world: int, idle: int = 0) -> list[int]:
    """Environments dealt round-robin, 7 over 2 or 4 processes; the last `idle` processes get none."""
    return list(range(rank, ENVIRONMENTS, world - idle)) if rank < world - idle else []


def masked_gradients(mask: Mask, rank: int, world: int, idle: int) -> Gradients:
    model = Model()
    losses = (model.loss(e) for e in dealt(rank, world, idle))
    sandmask.distributed.backward(losses, model.named_parameters(), mask)
    return gradients(model)


def merged_moments(rank: int, world: int, idle: int) -> dict[str, Any]:
    moments = GradientMoments(log_magnitude=True)
    for e in dealt(rank, world, idle):
        moments.update({name: stack[e] for name, stack in stacks().items()})
    merged = sandmask.distributed.merge_moments(moments)
    assert merged is moments
    return {"count": merged.count, **{name: getattr(merged, name) for name in ("mean", "m2", "sign_sum", "log_sum")}}


def mean_of_the_largest(rank: int, world: int) -> Tensor:
    """Shares of 14, 8, 7 and 8 in 37 add up to more than 1 in float32."""
    count = (14, 8, 7, 8)[rank] if world == 4 else 3
    largest = torch.full((count, 2), torch.finfo(torch.float32).max)
    moments: GradientMoments = sandmask.distributed.merge_moments(GradientMoments.of_gradients(largest))
    mean: Tensor = moments.mean
    return mean


def scaled_gradients(rank: int, world: int) -> Gradients:
    model = Model()
    scaler = GradScaler("cpu", init_scale=64.0)
    losses = [model.loss(e) for e in dealt(rank, world)]
    sandmask.distributed.backward(losses, model.named_parameters(), SANDMask(0.1), scaler=scaler)
    return {name: None if grad is None else grad / 64 for name, grad in gradients(model).items()}


def message_of(losses: Any, params: Any) -> str:
    with pytest.raises(MaskError) as caught:
        sandmask.distributed.backward(losses, params, ANDMask(1.0))
    return str(caught.value)


def messages(rank: int) -> dict[str, str]:
    w = torch.ones(2, requires_grad=True)
    bad = w.sum() * (float("inf") if rank == 1 else 1.0)
    wrong_shape = GradientMoments().update({"w": torch.ones(3 if rank == 1 else 2)})
    with pytest.raises(MaskError) as different:
        sandmask.distributed.merge_moments(wrong_shape)
    found = {
        "not finite": message_of([w.sum(), bad], [("w", w)]),
        "not scalar": message_of([w.sum(), w if rank == 1 else w.sum()], [w]),
        "too few": message_of([w.sum()] if rank == 0 else [], [w]),
        "none": message_of([], [w]),
        "different": str(different.value),
    }
    assert w.grad is None
    return found


def work(rank: int, world: int, folder: str) -> None:
    """What every process does."""
    torch.set_num_threads(1)
    _processes._BUCKET = 10  # several buckets, even for these tensors
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        results = {
            "gradients": [[masked_gradients(mask, rank, world, idle) for mask in MASKS] for idle in (0, 1)],
            "moments": [merged_moments(rank, world, idle) for idle in (0, 1)],
            "largest": mean_of_the_largest(rank, world),
            "scaled": scaled_gradients(rank, world),
            "messages": messages(rank),
        }
        torch.save(results, Path(folder) / f"{rank}.pt")
    finally:
        leave_group()


@pytest.fixture(scope="module", params=[2, 4], ids=lambda world: f"{world} processes")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    start_processes(  # type: ignore[no-untyped-call]
        work, args=(request.param, str(folder)), nprocs=request.param, start_method="forkserver"
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


@pytest.mark.parametrize("idle", [0, 1])
def test_gradients_are_those_of_one_process(results: list[dict[str, Any]], idle: int) -> None:
    for i, mask in enumerate(MASKS):
        model = Model()
        sandmask.backward([model.loss(e) for e in range(ENVIRONMENTS)], model.named_parameters(), mask)
        expected = gradients(model)
        assert expected["head.weight"] is not None
        assert expected["nobody.weight"] is None
        for result in results:
            found = result["gradients"][idle][i]
            assert list(found) == list(expected)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("idle", [0, 1])
def test_moments_are_those_of_one_process(results: list[dict[str, Any]], idle: int) -> None:
    expected = GradientMoments.of_gradients(stacks(), log_magnitude=True)
    for result in results:
        found = result["moments"][idle]
        assert found["count"] == ENVIRONMENTS
        for name in ("mean", "m2", "sign_sum", "log_sum"):
            torch.testing.assert_close(found[name], getattr(expected, name), rtol=1e-4, atol=1e-6)
        assert all(bool(mean.isfinite().all()) for mean in found["mean"].values())


def test_means_of_the_largest_numbers_are_finite(results: list[dict[str, Any]]) -> None:
    for result in results:
        expected = torch.full((2,), torch.finfo(torch.float32).max)
        torch.testing.assert_close(result["largest"], expected)


def test_every_process_has_the_same_numbers(results: list[dict[str, Any]]) -> None:
    for result in results[1:]:
        torch.testing.assert_close(result["gradients"], results[0]["gradients"], rtol=0, atol=0)


def test_a_scaler_changes_nothing(results: list[dict[str, Any]]) -> None:
    for result in results:
        torch.testing.assert_close(result["scaled"], result["gradients"][0][1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("not finite", "In process 1 of the group: The gradient of `w` in environment 1 should be finite. Found inf"),
        ("not scalar", "In process 1 of the group: The loss of environment 1 should be a scalar"),
        ("too few", "The number of environments should be at least 2: a mask compares them. Found 1."),
        ("none", "Found 0."),
        ("different", "Every process should have gradients of the same tensors"),
    ],
)
def test_mistakes_are_raised_in_every_process(results: list[dict[str, Any]], mistake: str, message: str) -> None:
    for result in results:
        assert re.search(re.escape(message), result["messages"][mistake])


def test_without_a_process_group() -> None:
    with pytest.raises(MaskError, match="torchrun"):
        sandmask.distributed.merge_moments(GradientMoments())
    w = torch.ones(1, requires_grad=True)
    with pytest.raises(MaskError, match="torchrun"):
        sandmask.distributed.backward([w.sum()], [w], ANDMask(1.0))
