"""A whole training step of ResNet-50 on PACS: sampling, decoding, augmentation, gradients, mask, Adam.

python -m benchmarks.image_step DATA_DIR [captured]     # holds PACS/; only captured steps
python -m benchmarks.image_step generated memory        # noise in PACS's layout; on the device and in memory
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchvision.io import write_jpeg

from benchmarks._measure import alternate, print_rows
from sandmask.datasets import DATASETS, Dataset, load_dataset
from sandmask.functional import EnvBatch
from sandmask.training import Stack, make_spec, set_precision
from sandmask.training.cuda_graph import Carry, Program

STEPS, READINGS = 100_000, 5
STEPS_A_READING = 30  # between two waits for the device; a multiple of those that a captured program takes at once


def generate(folder: Path, each: int = 24) -> Path:
    """Images of noise, of the size and in the layout of PACS's."""
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        for name in ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"):
            place = folder / "PACS" / domain / name
            place.mkdir(parents=True)
            for number in range(each):
                write_jpeg(torch.randint(256, (3, 227, 227), dtype=torch.uint8), str(place / f"{number}.jpg"))
    return folder


class FixedBatch(Stack):
    """A stack that trains on one batch again and again: the same step without its data."""

    def use(self, batch: EnvBatch) -> "FixedBatch":
        """The batch to train on."""
        self._fixed = batch
        return self

    def batches(self, start: torch.Tensor, count: int, read: Sequence[Any] = ()) -> Iterator[EnvBatch]:  # noqa: ARG002
        """That batch."""
        return (self._fixed for _ in range(count))


def program(dataset: Dataset, algorithm: str, *, compiled: bool, fast: bool, bare: bool = False) -> Program:
    """One training run, ready to be moved on."""
    hparams = {"tau": 0.5} if algorithm == "SANDMask" else {}
    options = {"network": "resnet50.tv_in1k", "weights": "none", "precision": "bf16"}
    spec = make_spec(DATASETS["PACS"], algorithm, [3], steps=STEPS, hparams=hparams, **options)  # type: ignore[arg-type]
    set_precision("bf16")
    kind = FixedBatch if bare else Stack
    stack = kind([spec], dataset, torch.device("cuda"), weights="none", compiled=compiled)
    if isinstance(stack, FixedBatch):
        stack.use(next(Stack.batches(stack, torch.tensor(0, device="cuda"), 1)))
    run = Program(stack, Carry(stack.init(), {}, torch.full((1,), -1, device="cuda")), fast=fast)
    run.advance(1)
    return run


def milliseconds(runs: dict[str, Program]) -> dict[str, float]:
    """Of one step of each, taking turns."""
    for run in runs.values():
        several(run)  # compiles and captures
    actions = {name: partial(several, run) for name, run in runs.items()}
    seconds = alternate(actions, READINGS, warmup=1)
    return {name: 1e3 * value / STEPS_A_READING for name, value in seconds.items()}


def several(run: Program, steps: int = STEPS_A_READING) -> None:
    """Move a program on by the same number of steps, however many a call of it takes."""
    end = run.done + steps
    while run.done < end:
        run.advance(end - run.done)


def main() -> None:
    if not torch.cuda.is_available() or len(sys.argv) < 2:
        print("image_step: needs a CUDA device and the folder that holds PACS; skipped.")
        return
    where = generate(Path(tempfile.mkdtemp())) if sys.argv[1] == "generated" else Path(sys.argv[1])
    rows: list[tuple[str, ...]] = [
        ("images kept", "how", "ERM ms", "SAND-mask ms", "ratio", "ERM: share of the bare rate", "SAND: the same")
    ]
    ways = [("device", True, True), ("device", False, True)]
    if "memory" in sys.argv[2:]:
        ways = [("device", True, True), ("memory", True, True)]
    elif "captured" not in sys.argv[2:]:
        ways += [("device", False, False), ("device", True, False), ("memory", True, True)]
    for cache, compiled, fast in ways:
        dataset = load_dataset("PACS", where, cache=cache)
        on_device = dataset if cache == "device" else load_dataset("PACS", where, cache="device")
        t = milliseconds(
            {
                "ERM": program(dataset, "ERM", compiled=compiled, fast=fast),
                "SAND": program(dataset, "SANDMask", compiled=compiled, fast=fast),
                "bare ERM": program(on_device, "ERM", compiled=compiled, fast=fast, bare=True),
                "bare SAND": program(on_device, "SANDMask", compiled=compiled, fast=fast, bare=True),
            }
        )
        how = " + ".join([*(["compiled"] if compiled else []), "captured" if fast else "eager"])
        shares = (f"{t['bare ERM'] / t['ERM']:.0%}", f"{t['bare SAND'] / t['SAND']:.0%}")
        ratio = f"{t['SAND'] / t['ERM']:.2f}"
        rows.append((f"on the {cache}", how, f"{t['ERM']:.1f}", f"{t['SAND']:.1f}", ratio, *shares))
        print(*rows[-1], file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    print_rows("ResNet-50, PACS, 3 x 32 images, bf16: whole step (DomainBed's bare update: 47.8 / 103.7 ms)", rows)


if __name__ == "__main__":
    main()
