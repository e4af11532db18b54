"""Gradients that three processes take together are those of one."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import vmap
from torch.multiprocessing.spawn import start_processes

from sandmask.errors import SandmaskError
from sandmask.functional import Autograd, EnvBatch, make_batch, random
from sandmask.functional.across_processes import AcrossProcesses, divided
from sandmask.functional.ranks import Ranks
from sandmask.training.processes import leave_group

WORLD, ROWS, SIZE = 3, 7, 4


def batch_of(n_envs: int) -> EnvBatch:
    generator = torch.Generator().manual_seed(n_envs)
    x = torch.randn(n_envs, ROWS, SIZE, generator=generator, dtype=torch.float64)
    return make_batch(x, torch.zeros(n_envs, ROWS, dtype=torch.int64), random.key_of(0))


def losses(vector: Tensor, batch: EnvBatch) -> Tensor:
    """Not a mean over examples, so that processes have to divide passes, not losses."""
    weight = vector.view(SIZE, SIZE)
    outputs: Tensor = divided(lambda x: (x @ weight).tanh(), batch.inputs)
    return batch.split(outputs).sum(1).square().sum(-1)


def check_environments(ranks: Ranks, vector: Tensor) -> None:
    """With fewer environments than processes, as many, and more."""
    together, alone = AcrossProcesses(ranks, Autograd()), Autograd()
    for n_envs in range(1, 8):
        batch = batch_of(n_envs)
        moments, values = together.environment_moments(losses, vector, batch, log_magnitude=True)
        expected, risks = alone.environment_moments(losses, vector, batch, log_magnitude=True)
        torch.testing.assert_close(vars(moments), vars(expected))
        torch.testing.assert_close(values, risks)
        vectors = vector * torch.arange(1, n_envs + 1).unsqueeze(1)
        found = together.environment_gradients(losses, vectors, batch)
        torch.testing.assert_close(found, alone.environment_gradients(losses, vectors, batch))


def check_nested(ranks: Ranks, vector: Tensor) -> None:
    """A pass whose inputs are another one's outputs, of other rows; parameters that are also used beside passes."""
    x = batch_of(1).inputs

    def objective(vector: Tensor) -> tuple[Tensor, Tensor]:
        weight = vector.view(SIZE, SIZE)
        hidden = divided(lambda x: (x @ weight).tanh(), x)
        outputs = divided(lambda x: (x @ weight).tanh(), hidden.flip(0) * hidden.sum(0))
        return outputs.sum(0).square().sum() + weight.exp().sum(), outputs

    found = AcrossProcesses(ranks, Autograd()).gradient(objective, vector)
    torch.testing.assert_close(found, Autograd().gradient(objective, vector))


def check_pullbacks(ranks: Ranks, vector: Tensor) -> None:
    batch = batch_of(2)
    found: list[Tensor] = []
    wanted: list[Tensor] = []
    for results, way in ((found, AcrossProcesses(ranks, Autograd())), (wanted, Autograd())):
        values, pull = way.pullback(lambda vector: losses(vector, batch), vector)
        results += [values, pull(values + 1)]
    torch.testing.assert_close(found, wanted)


def check_transforms(ranks: Ranks, vector: Tensor) -> None:
    def objective(vector: Tensor) -> tuple[Tensor, tuple[()]]:
        return vmap(lambda x: divided(lambda x: x * vector[0], x))(torch.ones(2, WORLD)).sum(), ()

    with pytest.raises(SandmaskError, match=r"gradients inside its objective"):
        AcrossProcesses(ranks, Autograd()).gradient(objective, vector)


def work(rank: int, folder: str) -> None:
    """What every process does."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        vector = torch.randn(SIZE * SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for check in (check_environments, check_nested, check_pullbacks, check_transforms):
            check(Ranks(rank, WORLD), vector)
    finally:
        leave_group()


def test_three_processes_compute_the_gradients_of_one(tmp_path: object) -> None:
    start_processes(work, args=(str(tmp_path),), nprocs=WORLD, start_method="forkserver")  # type: ignore[no-untyped-call]
