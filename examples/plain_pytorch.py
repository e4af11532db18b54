"""Two changed lines in an ordinary PyTorch loop: 16 domains, tested on one that was not trained on.

The first two inputs predict the label everywhere, but noisily. The other sixteen predict it perfectly, in a
way that is different in every domain. The usual gradient learns both, and fails where the shortcuts
are missing; a mask keeps what the domains agree on.

    python examples/plain_pytorch.py --steps 150

The data is designed so that masks help (in a first version, with other data, model and number of domains, they did
worse than the plain gradient). It shows how to use them and is not evidence that they help elsewhere.
"""

import argparse

import torch
from torch import Tensor, nn

import sandmask

DOMAINS = 16


def make_domain(size: int, generator: torch.Generator, *, shortcuts: bool = True) -> tuple[Tensor, Tensor]:
    """Inputs and labels: two inputs hold in every domain, sixteen in this one alone."""
    label = torch.randint(2, (size,), generator=generator)
    sign = 2.0 * label[:, None] - 1
    lasting = 0.7 * sign + torch.randn(size, 2, generator=generator)
    shortcut = torch.randn(16, generator=generator) * sign
    if not shortcuts:
        shortcut = torch.randn(size, 16, generator=generator)
    return torch.cat([lasting, shortcut], dim=1), label


def train(mask: sandmask.Mask | None, domains: list[tuple[Tensor, Tensor]], steps: int) -> nn.Module:
    """An ordinary training loop; `mask=None` is the usual gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=3e-4)  # not AdamW
    for _ in range(steps):
        optimizer.zero_grad()
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in domains]
        if mask is None:
            torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        else:
            report = sandmask.backward(losses, model.named_parameters(), mask)
        optimizer.step()
    if mask is not None:
        print(f"\nthe last step of {mask}:\n{report}")
    return model


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of labels that are right."""
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    """Train three ways, and compare on the domain without shortcuts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # for so small a model, more threads mostly wait for each other
    generator = torch.Generator().manual_seed(1)
    domains = [make_domain(64, generator) for _ in range(DOMAINS)]
    unseen = make_domain(4096, generator, shortcuts=False)

    masks = {
        "plain gradient": None,
        "AND-mask": sandmask.ANDMask(tau=0.9, rescale="sparsity"),
        "SAND-mask": sandmask.SANDMask(tau=0.9, rescale="sparsity"),
    }
    models = {name: train(mask, domains, steps) for name, mask in masks.items()}
    print(f"\n{'':<16}{'seen domains':>14}{'unseen domain':>15}")
    for name, model in models.items():
        seen = sum(accuracy(model, x, y) for x, y in domains) / DOMAINS
        print(f"{name:<16}{seen:>14.1%}{accuracy(model, *unseen):>15.1%}")


if __name__ == "__main__":
    main()
