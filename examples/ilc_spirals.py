"""The Spirals experiment of "Learning explanations that are hard to vary" (ILC), in a plain PyTorch loop.

Two interleaved spirals predict the label in all 16 domains, and a signature predicts it within each domain. The test
set has random signatures, so only the spirals help there. Settings are those of the authors' released script
(`run_synthetic.py` with 16 dimensions of signature): batches of 256 from each domain, 150 epochs of 4 steps, Adam with
a learning rate of 1e-2 that is multiplied by 0.1 after 112 epochs, L2 of 1e-3 in the gradient, three hidden layers of
256 LeakyReLU units, Kaiming-normal weights, biases of 0.01, one logit with binary cross-entropy, tau = 1, rescaled.

    python examples/ilc_spirals.py --seeds 4        # 16 runs; the first column of numbers appears after one run
    python examples/ilc_spirals.py --steps 60       # a short look: nothing is learned yet

A seed determines the initial weights and the order of the examples; the data is the same. The mask alone is not enough:
the rescaling and the L2 term in Adam's gradient both matter.
"""

import argparse
import time
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sandmask
from sandmask.datasets.spirals import spiral_environment

DOMAINS, BATCH, WIDTH = 16, 256, 256
STEPS = 600  # 150 epochs of 1,024 / 256 steps

MASKS: dict[str, sandmask.Mask | None] = {
    "mean gradient": None,
    "AND-mask, rescaled": sandmask.ANDMask(tau=1.0, rescale="sparsity"),
    "AND-mask": sandmask.ANDMask(tau=1.0),
    "SAND-mask, rescaled": sandmask.SANDMask(tau=0.9, rescale="sparsity"),
}


def make_model() -> nn.Sequential:
    """Three hidden layers and one logit, initialized as in the released script."""
    sizes = [2 + 16, WIDTH, WIDTH, WIDTH]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.LeakyReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1), nn.Flatten(0))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.constant_(layer.bias, 0.01)
    return model


def batches_of_epoch(domains: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """The steps of an epoch: for each, a batch of every domain."""
    orders = [torch.split(torch.randperm(len(y)), BATCH) for _, y in domains]
    return [
        [(x[rows], y[rows]) for (x, y), rows in zip(domains, step, strict=True)] for step in zip(*orders, strict=True)
    ]


def train(mask: sandmask.Mask | None, domains: list[tuple[Tensor, Tensor]], steps: int, seed: int) -> nn.Module:
    """An ordinary training loop; `mask=None` is the mean gradient."""
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3)  # not AdamW
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps * 112 // 150], gamma=0.1)
    queue: list[list[tuple[Tensor, Tensor]]] = []
    for _ in range(steps):
        queue = queue or batches_of_epoch(domains)
        batches = queue.pop()
        optimizer.zero_grad()
        if mask is None:
            x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
            F.binary_cross_entropy_with_logits(model(x), y).backward()  # type: ignore[no-untyped-call]
        else:
            moments = sandmask.environment_moments(model, F.binary_cross_entropy_with_logits, batches)
            sandmask.set_gradients(model.named_parameters(), mask, moments)
        optimizer.step()
        scheduler.step()
    return model


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of labels that are right."""
    with torch.no_grad():
        return float(((model(x) > 0) == (y > 0.5)).float().mean())


def main() -> None:
    """Train every seed in each of four ways, and print test accuracies as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    parts = [spiral_environment(e) for e in range(DOMAINS + 1)]
    test, *domains = [(x, y.float()) for x, y in parts]  # number 0 has random signatures

    start = time.perf_counter()
    print(f"{'test accuracy':<22}" + "".join(f"{f'seed {seed}':>9}" for seed in range(args.seeds)) + f"{'mean':>9}")
    for name, mask in MASKS.items():
        print(f"{name:<22}", end="", flush=True)
        found = []
        for seed in range(args.seeds):
            found.append(accuracy(train(mask, domains, args.steps, seed), *test))
            print(f"{found[-1]:>9.1%}", end="", flush=True)
        print(f"{sum(found) / len(found):>9.1%}", flush=True)
    seconds = (time.perf_counter() - start) / (len(MASKS) * args.seeds)
    print(f"{seconds:.1f} seconds a run, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
