"""A mask in Lightning: manual optimization, and a masked backward pass instead of `self.manual_backward`.

Every domain has its own loader. Lightning takes a dictionary of loaders and gives `training_step` one batch of each,
for one loss per domain. Logging, checkpoints, callbacks and validation remain Lightning's.

    python examples/lightning_module.py --epochs 15

The data is designed so that masks help: most inputs predict the label in one domain only. The others allow at most
88%.
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
    """A classifier whose gradients go through a mask."""

    def __init__(self, mask: sandmask.Mask) -> None:
        super().__init__()
        self.automatic_optimization = False  # gradients are ours
        self.mask = mask
        self.network = nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batches: dict[str, Batch]) -> None:
        """One batch of every domain in, one step out."""
        sizes = [len(y) for _, y in batches.values()]
        with sandmask.record(self.network, sizes) as recording:  # one forward pass for all domains
            logits = self.network(torch.cat([x for x, _ in batches.values()]))
        parts = zip(torch.split(logits, sizes), batches.values(), strict=True)
        losses = [nn.functional.cross_entropy(rows, y) for rows, (_, y) in parts]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        report = recording.backward(losses, self.mask, processes="average")
        optimizer.step()
        self.log("density", report.density, on_step=False, on_epoch=True)
        self.log("loss", torch.stack(losses).mean().detach(), on_step=False, on_epoch=True)

    def validation_step(self, batch: Batch) -> None:
        """Accuracy; validation is untouched by masks."""
        x, y = batch
        self.log("unseen", (self.network(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam with its own weight decay, not AdamW."""
        return torch.optim.Adam(self.parameters(), lr=5e-3, weight_decay=3e-4)


def train(mask: sandmask.Mask, epochs: int) -> dict[str, float]:
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
    """Train with the mean gradient and with a mask, and compare on a domain without shortcuts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)  # for so small a model, more threads mostly wait for each other
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # its advice on loaders and GPUs
    warnings.filterwarnings("ignore", module="lightning")

    print(f"{'':<16}{'training loss':>15}{'mask density':>15}{'unseen domain':>15}")
    for name, tau in {"plain gradient": 0.0, "AND-mask": 0.9}.items():  # tau = 0 lets everything through
        logged = train(sandmask.ANDMask(tau, rescale="sparsity"), epochs)
        print(f"{name:<16}{logged['loss']:>15.3f}{logged['density']:>15.1%}{logged['unseen']:>15.1%}")


if __name__ == "__main__":
    main()
