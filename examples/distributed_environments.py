"""Domains spread over processes, with `DistributedDataParallel`.

Each process computes the losses of its own domains. `sandmask.backward(..., processes="merge")` merges counts, signs,
means and squared deviations with all-reduce, and then applies the mask: every process has the same gradient as one
process with all domains. `DistributedDataParallel` copies the model to all processes at the start; it does not
average masked gradients.

    torchrun --standalone --nproc-per-node 2 examples/distributed_environments.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sandmask

DOMAINS = 5


def make_model() -> nn.Module:
    """The same model in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))


def loss_of(model: nn.Module, domain: int) -> Tensor:
    """The loss of one domain, on generated data."""
    generator = torch.Generator().manual_seed(domain)
    x, slope = torch.randn(64, 6, generator=generator), torch.randn(6, generator=generator)
    return nn.functional.mse_loss(model(x).squeeze(1), x[:, 0] + x @ slope)


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of any two gradients."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((p.grad - q.grad).abs().max().item() for p, q in pairs if p.grad is not None and q.grad is not None)


def main() -> None:
    """Mask the same domains in several processes and in one, and compare."""
    if "RANK" not in os.environ:
        raise SystemExit("Start it with: torchrun --standalone --nproc-per-node 2 examples/distributed_environments.py")
    torch.set_num_threads(1)  # the processes share the cores
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mask = sandmask.SANDMask(tau=0.5)

    model = DistributedDataParallel(make_model())
    mine = range(rank, DOMAINS, world)
    losses = (loss_of(model, domain) for domain in mine)
    report = sandmask.backward(losses, model.named_parameters(), mask, processes="merge")

    alone = make_model()
    losses = (loss_of(alone, domain) for domain in range(DOMAINS))
    sandmask.backward(losses, alone.named_parameters(), mask, processes="alone")

    if rank == 0:
        print(f"{world} processes, {DOMAINS} domains; {report.total}")
        print(f"largest difference to one process: {largest_difference(model, alone):.1e}")
    print(f"process {rank} had domains {list(mine)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
