"""Cost of schedules, decoupled weight decay and averaged weights: a stacked Spirals step relative to a plain one.

python -m benchmarks.optimizer_options [RUNS]     # 256 runs on a GPU, 4 on a CPU, by default
"""

import sys
from collections.abc import Sequence

import torch

from benchmarks._measure import alternate, print_rows
from sandmask.datasets import DATASETS, load_dataset
from sandmask.training import Stack, make_spec
from sandmask.training.cuda_graph import Carry, Program
from sandmask.training.precision import stack_settings

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = 10  # between two evaluations
OPTIONS: dict[str, tuple[dict[str, float], Sequence[str]]] = {
    "plain": ({}, ()),
    "cosine": ({"lr_final": 0.0}, ()),
    "warm-up, cosine and steps": ({"lr_final": 0.0, "lr_warmup": 0.1, "lr_drop": 0.1, "lr_drop_every": 0.5}, ()),
    "decoupled decay": ({"decoupled_decay": 0.01}, ()),
    "SMA": ({}, ("sma",)),
    "SMA, EMA and SWAD": ({}, ("sma", "ema", "swad")),
    "cosine and SMA": ({"lr_final": 0.0}, ("sma",)),
}


def program(n_runs: int, options: dict[str, float], averages: Sequence[str]) -> Program:
    """Make a stack of SAND-mask runs that has begun to train, as a CUDA graph if possible."""
    hparams = {"tau": 0.5, "batch_size": 128, "mlp_width": 256, "mlp_depth": 3, **options}
    specs = [
        make_spec(
            DATASETS["Spirals"], "SANDMask", [k % 16], hparams=hparams, seed=k, precision="tf32", averages=averages
        )
        for k in range(n_runs)
    ]
    stack = Stack(specs, load_dataset("Spirals"), DEVICE)
    made = Program(stack, Carry(stack.init(), {}, torch.full((n_runs,), -1, device=DEVICE)))
    made.advance(1)
    return made


def ten_steps(running: Program) -> None:
    until = running.done + STEPS
    while running.done < until:
        running.advance(until - running.done)


def main() -> None:
    n_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 256 if DEVICE.type == "cuda" else 4
    with stack_settings("tf32", DEVICE):
        programs = {name: program(n_runs, *chosen) for name, chosen in OPTIONS.items()}
        seconds = alternate({name: lambda p=p: ten_steps(p) for name, p in programs.items()}, 9)  # type: ignore[misc]
    rows: list[tuple[str, ...]] = [("options", "step over the plain one")]
    rows += [(name, f"{taken / seconds['plain']:.3f}") for name, taken in seconds.items()]
    print_rows(f"Spirals MLP, SAND-mask, 16 x 128 examples, stack of {n_runs}, {DEVICE.type}", rows)


if __name__ == "__main__":
    main()
