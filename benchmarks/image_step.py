"""A whole training step of ResNet-50 on PACS: sampling, decoding, augmentation, gradients, mask, Adam.

python -m benchmarks.image_step DATA_DIR     # holds PACS/
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks._measure import alternate, print_rows
from sandmask.datasets import DATASETS, Dataset, load_dataset
from sandmask.functional import EnvBatch
from sandmask.training import Stack, make_spec

STEPS, REPEATS = 100_000, 40


class Run:
    """One training run that can be stepped."""

    def __init__(self, dataset: Dataset, algorithm: str, *, compiled: bool) -> None:
        hparams = {"tau": 0.5} if algorithm == "SANDMask" else {}
        spec = make_spec(
            DATASETS["PACS"],
            algorithm,
            [3],
            steps=STEPS,
            hparams=hparams,
            network="resnet50.tv_in1k",
            weights="none",
            precision="bf16",
        )
        self.stack = Stack([spec], dataset, torch.device("cuda"), weights="none", compiled=compiled)
        self.state = self.stack.init()
        self.feed: Iterator[EnvBatch] = self.stack.feed(0)
        self.batch = next(self.feed)

    def whole(self) -> None:
        """A step with a new batch."""
        self.state, _ = self.stack.step(self.state, next(self.feed))

    def bare(self) -> None:
        """A step with a batch that is already there."""
        self.state, _ = self.stack.step(self.state, self.batch)


def main() -> None:
    if not torch.cuda.is_available() or len(sys.argv) < 2:
        print("image_step: needs a CUDA device and the folder that holds PACS; skipped.")
        return
    rows: list[tuple[str, ...]] = [
        ("images kept", "network", "ERM ms", "SAND-mask ms", "ratio", "ERM: rate of the bare step", "SAND: the same")
    ]
    for cache, compiled in (("device", False), ("device", True), ("memory", True)):
        dataset = load_dataset("PACS", Path(sys.argv[1]), cache=cache)
        erm, sand = (Run(dataset, name, compiled=compiled) for name in ("ERM", "SANDMask"))
        actions = {"ERM": erm.whole, "SAND": sand.whole, "bare ERM": erm.bare, "bare SAND": sand.bare}
        # Images in memory are decoded at first sight: by then most have been seen.
        t = alternate(actions, REPEATS, warmup=60 if cache == "memory" else 5)
        rows.append(
            (
                f"in {cache} memory" if cache == "device" else "in memory",
                "compiled" if compiled else "eager",
                f"{1e3 * t['ERM']:.1f}",
                f"{1e3 * t['SAND']:.1f}",
                f"{t['SAND'] / t['ERM']:.2f}",
                f"{t['bare ERM'] / t['ERM']:.0%}",
                f"{t['bare SAND'] / t['SAND']:.0%}",
            )
        )
    print_rows("ResNet-50, PACS, 3 x 32 images, bf16: whole step (DomainBed's bare update: 47.8 / 103.7 ms)", rows)


if __name__ == "__main__":
    main()
