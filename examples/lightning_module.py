"""A mask in Lightning: manual optimization, and `sandmask.backward` where `self.manual_backward` would be.

Every domain has a loader of its own. Lightning takes a dictionary of loaders and hands `training_step` one batch of
each: one loss a domain, as a mask wants it. Logging, checkpoints, callbacks and validation stay Lightning's.

    python examples/lightning_module.py --epochs 15

The data is made so that masks help: most inputs predict the label in one domain alone. The best that the lasting ones
allow is 88%.
"""

import argparse
import logging
import warnings
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sandmask

DOMAINS = 8
INPUTS = 12

Batch = tuple[Tensor, Tensor]


def make_domain(size: int, seed: int, *, shortcut: bool = True) -> TensorDataset:
    """Labels that four noisy inputs predict in every domain, and eight others perfectly, in this one alone."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (size,), generator=generator)
    sign = 2.0 * label[:, None] - 1
    lasting = 0.6 * sign + torch.randn(size, 4, generator=generator)
    own = torch.randn(INPUTS - 4, generator=generator) * sign
    if not shortcut:
        own = torch.randn(size, INPUTS - 4, generator=generator)
    return TensorDataset(torch.cat([lasting, own], dim=1), label)


class MaskedClassifier(lightning.LightningModule):
    """A classifier whose gradients go through a mask; `mask=None` is the usual gradient."""

    def __init__(self, mask: sandmask.Mask | None) -> None:
        super().__init__()
        self.automatic_optimization = False  # gradients are ours
        self.mask = mask
        self.network = nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batches: dict[str, Batch]) -> None:
        """One batch of every domain in, one step out."""
        losses = [nn.functional.cross_entropy(self.network(x), y) for x, y in batches.values()]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if self.mask is None:
            self.manual_backward(torch.stack(losses).mean())
        else:
            report = sandmask.backward(losses, self.named_parameters(), self.mask, processes="average")
            self.log("density", report.density, on_step=False, on_epoch=True)
        optimizer.step()
        self.log("loss", torch.stack(losses).mean().detach(), on_step=False, on_epoch=True)

    def validation_step(self, batch: Batch) -> None:
        """Accuracy; validation is untouched by masks."""
        x, y = batch
        self.log("unseen", (self.network(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def train(mask: sandmask.Mask | None, epochs: int) -> dict[str, float]:
    """Fit, and what was logged last."""
    lightning.seed_everything(0, verbose=False)
    domains = [make_domain(256, seed=e) for e in range(DOMAINS)]
    loaders = {f"domain {e}": DataLoader(domain, batch_size=64, shuffle=True) for e, domain in enumerate(domains)}
    unseen = DataLoader(make_domain(4096, seed=99, shortcut=False), batch_size=1024)
    model = MaskedClassifier(mask)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, loaders, unseen)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def main() -> None:
    """Train with and without a mask, and compare on a domain without shortcuts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)  # for so small a model, more threads mostly wait for each other
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # its advice on loaders and GPUs
    warnings.filterwarnings("ignore", module="lightning")

    print(f"{'':<16}{'training loss':>15}{'mask density':>15}{'unseen domain':>15}")
    for name, mask in {"plain gradient": None, "AND-mask": sandmask.ANDMask(tau=1.0)}.items():
        logged = train(mask, epochs)
        density = f"{logged['density']:.1%}" if "density" in logged else "-"
        print(f"{name:<16}{logged['loss']:>15.3f}{density:>15}{logged['unseen']:>15.1%}")


if __name__ == "__main__":
    main()
