"""A whole training step of ResNet-50 on PACS: sampling, decoding, augmentation, gradients, mask, Adam.

python -m benchmarks.image_step DATA_DIR [captured]     # DATA_DIR contains PACS/; `captured`: only captured steps
python -m benchmarks.image_step generated memory        # generated noise in PACS's layout, on the device and in memory
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
STEPS_A_READING = 30  # steps between two waits for the device; a multiple of the steps in a captured program


def generate(folder: Path, each: int = 24) -> Path:
    """Write images of noise with the size and layout of PACS."""
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        for name in ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"):
            place = folder / "PACS" / domain / name
            place.mkdir(parents=True)
            for number in range(each):
                write_jpeg(torch.randint(256, (3, 227, 227), dtype=torch.uint8), str(place / f"{number}.jpg"))
    return folder


class FixedBatch(Stack):
    """A stack that trains on the same batch again and again, to measure a step without loading data."""

    batch: EnvBatch

    @classmethod
    def of(cls, stack: Stack) -> "FixedBatch":
        """Copy another stack, whose dataset is on the device, and keep the batch of its first step."""
        fixed = cls.__new__(cls)
        fixed.__dict__.update(vars(stack))
        fixed.batch = next(stack.batches(torch.tensor(0, device=stack.device), 1))
        return fixed

    def batches(self, start: torch.Tensor, count: int, read: Sequence[Any] = ()) -> Iterator[EnvBatch]:  # noqa: ARG002
        """Yield this batch."""
        return (self.batch for _ in range(count))


def stack_of(dataset: Dataset, algorithm: str, *, compiled: bool) -> Stack:
    """Make a stack of one run."""
    hparams = {"tau": 0.5} if algorithm == "SANDMask" else {}
    options = {"network": "resnet50.tv_in1k", "weights": "none", "precision": "bf16"}
    spec = make_spec(DATASETS["PACS"], algorithm, [3], steps=STEPS, hparams=hparams, **options)  # type: ignore[arg-type]
    set_precision("bf16")
    return Stack([spec], dataset, torch.device("cuda"), weights="none", compiled=compiled)


def program(stack: Stack, *, fast: bool) -> Program:
    """Make the program of a stack that has begun to train."""
    run = Program(stack, Carry(stack.init(), {}, torch.full((1,), -1, device="cuda")), fast=fast)
    run.advance(1)
    return run


def milliseconds(runs: dict[str, Program]) -> dict[str, float]:
    """Measure milliseconds of one step of each program. They take turns."""
    for run in runs.values():
        several(run)  # compiles and captures
    actions = {name: partial(several, run) for name, run in runs.items()}
    seconds = alternate(actions, READINGS, warmup=1)
    return {name: 1e3 * value / STEPS_A_READING for name, value in seconds.items()}


def several(run: Program, steps: int = STEPS_A_READING) -> None:
    """Advance a program by a number of steps, however many steps one call takes."""
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
        runs = {}
        for name, algorithm in (("ERM", "ERM"), ("SAND", "SANDMask")):
            stack = stack_of(dataset, algorithm, compiled=compiled)
            resident = stack if cache == "device" else stack_of(on_device, algorithm, compiled=compiled)
            runs[name] = program(stack, fast=fast)
            runs[f"bare {name}"] = program(FixedBatch.of(resident), fast=fast)
        t = milliseconds(runs)
        how = " + ".join([*(["compiled"] if compiled else []), "captured" if fast else "eager"])
        shares = (f"{t['bare ERM'] / t['ERM']:.0%}", f"{t['bare SAND'] / t['SAND']:.0%}")
        ratio = f"{t['SAND'] / t['ERM']:.2f}"
        rows.append((f"on the {cache}", how, f"{t['ERM']:.1f}", f"{t['SAND']:.1f}", ratio, *shares))
        print(*rows[-1], file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    print_rows("ResNet-50, PACS, 3 x 32 images, bf16: whole step (DomainBed's bare update: 47.8 / 103.7 ms)", rows)


if __name__ == "__main__":
    main()
