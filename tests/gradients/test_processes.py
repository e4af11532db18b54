"""`sandmask.backward` in several processes, on plain and on `DistributedDataParallel` models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sandmask
from sandmask.masks import ANDMask, Mask, MaskError, SANDMask
from sandmask.training.processes import leave_group

WORLD, DOMAINS, STEPS = 2, 4, 3
DDP_OPTIONS: list[dict[str, Any]] = [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}]
MASK = SANDMask(0.1)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def domain(number: int, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(8, 4, generator=generator), torch.randint(2, (8,), generator=generator)


def losses(model: nn.Module, numbers: range, step: int = 0, rows: slice = slice(None)) -> list[Tensor]:
    batches = (domain(number, step) for number in numbers)
    return [F.cross_entropy(model(x[rows]), y[rows]) for x, y in batches]


def train(model: nn.Module, numbers: range, rows: slice = slice(None), **how: Any) -> list[Tensor]:
    """Parameters after a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        sandmask.backward(losses(model, numbers, step, rows), model.named_parameters(), MASK, **how)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def gradient_of_moments(model: nn.Module, numbers: range) -> list[Tensor | None]:
    moments = sandmask.environment_moments(model, F.cross_entropy, [domain(number) for number in numbers])
    sandmask.set_gradients(model.named_parameters(), MASK, moments, processes="merge")
    return [p.grad for p in model.parameters()]


def message(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(MaskError) as caught:
        call(*args, **options)
    return str(caught.value)


def record_and_backward(model: nn.Module, numbers: range) -> None:
    """With a loss for each of these domains, which may be too few."""
    batches = [domain(number) for number in range(DOMAINS)]
    with sandmask.record(model, [len(y) for _, y in batches]) as recording:
        logits = model(torch.cat([x for x, _ in batches])).chunk(DOMAINS)
    found = [F.cross_entropy(logits[number], batches[number][1]) for number in numbers]
    recording.backward(found, MASK, processes="average")


def backward(model: nn.Module, mask: Mask = MASK, numbers: range = range(DOMAINS), **how: Any) -> None:
    sandmask.backward(losses(model, numbers), model.named_parameters(), mask, **how)


def messages(rank: int) -> dict[str, str]:
    model = make_model()
    moments = sandmask.environment_moments(model, F.cross_entropy, [domain(0), domain(1)])
    other_class: Mask = ANDMask(0.1) if rank else MASK
    found = {
        "unsaid": message(backward, DistributedDataParallel(model)),
        "unsaid moments": message(sandmask.set_gradients, model.named_parameters(), MASK, moments),
        "average of moments": message(
            sandmask.set_gradients, model.named_parameters(), MASK, moments, processes="average"
        ),
        "tau": message(backward, model, SANDMask(0.1 + 0.1 * rank), processes="merge"),
        "class": message(backward, model, other_class, processes="average"),
        "no mask": message(backward, model, None if rank else MASK, processes="merge"),
        "ways": message(backward, model, processes="average" if rank else "merge"),
        "models": message(backward, make_model(seed=rank), processes="merge"),
        "fewer": message(backward, model, numbers=range(DOMAINS - rank), processes="average"),
        "fewer recorded": message(record_and_backward, model, range(DOMAINS - rank)),
        "sharded": message(sandmask.backward, [], sharded().named_parameters(), MASK, processes="merge"),
        "in parallel": message(backward, in_parallel(), processes="merge"),
        "gathered": message(backward, sharded(), processes="merge"),  # by the forward pass
        "empty": message(sandmask.backward, one_empty(rank), model.parameters(), MASK, processes="average"),
        "not a mask error": message(sandmask.backward, broken(rank), model.parameters(), MASK, processes="average"),
    }
    assert all(p.grad is None for p in model.parameters())
    return found


def sharded() -> nn.Module:
    model = make_model()
    fully_shard(model)
    return model


def in_parallel() -> nn.Module:
    how = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(make_model(), init_device_mesh("cpu", (WORLD,)), how)


def one_empty(rank: int) -> list[Tensor]:
    found = losses(model := make_model(), range(DOMAINS))
    return [found[0], model(torch.zeros(0, 4)).mean() if rank else found[1], *found[2:]]


def broken(rank: int) -> Iterator[Tensor]:
    model = make_model()
    for number in range(DOMAINS):
        if rank == 1 and number == 2:
            raise ZeroDivisionError("in the user's loss")
        yield losses(model, range(number, number + 1))[0]


def work(rank: int, folder: str) -> None:
    """What every process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    own, half = range(rank, DOMAINS, WORLD), slice(4 * rank, 4 * rank + 4)
    try:
        results = {
            "merge": [
                train(DistributedDataParallel(make_model(), **options), own, processes="merge")
                for options in DDP_OPTIONS
            ],
            "average": [
                train(DistributedDataParallel(make_model(), **options), range(DOMAINS), half, processes="average")
                for options in DDP_OPTIONS
            ],
            "alone": train(make_model(), own, processes="alone"),
            "moments": gradient_of_moments(DistributedDataParallel(make_model()), own),
            "messages": messages(rank),
        }
        torch.save(results, Path(folder) / f"{rank}.pt")
    finally:
        leave_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    start_processes(work, args=(str(folder),), nprocs=WORLD, start_method="forkserver")  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("how", ["merge", "average"])
@pytest.mark.parametrize("options", range(len(DDP_OPTIONS)), ids=lambda i: str(DDP_OPTIONS[i]))
def test_replicas_train_as_one_process_does(results: list[dict[str, Any]], how: str, options: int) -> None:
    expected = train(make_model(), range(DOMAINS))
    for result in results:
        torch.testing.assert_close(result[how][options], expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result[how][options], results[0][how][options], rtol=0, atol=0)


def test_alone_uses_the_losses_of_this_process(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        expected = train(make_model(), range(rank, DOMAINS, WORLD))
        torch.testing.assert_close(result["alone"], expected, rtol=0, atol=0)


def test_moments_are_merged_when_gradients_are_set(results: list[dict[str, Any]]) -> None:
    model = make_model()
    backward(model)
    for result in results:
        torch.testing.assert_close(result["moments"], [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("mistake", "parts"),
    [
        ("unsaid", ["2 processes", 'processes="merge"', 'processes="average"', 'processes="alone"']),
        ("unsaid moments", ["2 processes", 'processes="merge"']),
        ("average of moments", ["not averaged"]),
        ("tau", ["same mask", "SANDMask(tau=0.1", "SANDMask(tau=0.2"]),
        ("class", ["same mask", "SANDMask", "ANDMask"]),
        ("no mask", ["In process 1 of the group: Parameter `mask` should be a mask"]),
        ("ways", ["same `processes`", "merge", "average"]),
        ("models", ["same model", "`0.weight`", "processes 0 and 1"]),
        ("fewer", ["same number of environments", "Process 1"]),
        ("fewer recorded", ["In process 1 of the group", "a loss for each of the 4 environments", "Found 3"]),
        ("sharded", ["`0.weight` is a DTensor", "sharded"]),
        ("in parallel", ["`0.weight` is a DTensor", "tensor parallelism"]),
        ("gathered", ["`0.weight` is managed by `fully_shard`", "sharded"]),
        ("empty", ["In process 1 of the group: The loss of environment 1 should be finite. Found nan."]),
        ("not a mask error", ["In process 1 of the group: ZeroDivisionError: in the user's loss"]),
    ],
)
def test_mistakes_are_raised_in_every_process(results: list[dict[str, Any]], mistake: str, parts: list[str]) -> None:
    for result in results:
        for part in parts:
            assert part in result["messages"][mistake]


@pytest.mark.parametrize("how", ["merge", "average", "alone"])
def test_processes_have_no_effect_in_a_single_process(how: Any) -> None:
    torch.testing.assert_close(train(make_model(), range(DOMAINS), processes=how), train(make_model(), range(DOMAINS)))


def test_an_unknown_way_is_an_error() -> None:
    assert "'sum'" in message(backward, make_model(), processes="sum")


def test_parameters_of_fully_sharded_data_parallel_are_refused() -> None:
    model = make_model()
    model[0].weight._fsdp_flattened = True  # type: ignore[index]  # as FullyShardedDataParallel marks them
    assert "FullyShardedDataParallel" in message(backward, model)
    assert "FullyShardedDataParallel" in message(sandmask.environment_moments, model, F.cross_entropy, [domain(0)])
