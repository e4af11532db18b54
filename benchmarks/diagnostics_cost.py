"""Cost of `--diagnostics`: a SAND-mask step and an evaluation of Spirals runs with it, divided by those without it."""

from functools import partial

import torch
from torch import Tensor

from benchmarks._measure import alternate, print_rows
from sandmask.algorithms import Metrics, State
from sandmask.datasets import DATASETS, load_dataset
from sandmask.training import Stack, make_spec
from sandmask.training.precision import stack_settings


def evaluate(stack: Stack, state: State) -> tuple[tuple[Tensor, Metrics], Metrics]:
    """Do what the training loop does at an evaluation."""
    return stack.evaluate(state), stack.held_out(state)


def measure(n_runs: int, batch_size: int, repeats: int) -> tuple[float, float]:
    """Measure the ratios of a step and of an evaluation."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hparams = {"tau": 0.5, "batch_size": batch_size, "mlp_width": 256}
    specs = [make_spec(DATASETS["Spirals"], "SANDMask", [0], hparams=hparams, seed=k) for k in range(n_runs)]
    dataset = load_dataset("Spirals")
    stacks = {"without": Stack(specs, dataset, device), "with": Stack(specs, dataset, device, diagnostics=True)}
    state = stacks["with"].init()
    batch = next(iter(stacks["with"].batches(state["step"][0], 1)))
    with stack_settings("fp32", device):
        steps = alternate({name: partial(stack.step, state, batch) for name, stack in stacks.items()}, repeats)
        evaluations = alternate({name: partial(evaluate, stack, state) for name, stack in stacks.items()}, repeats // 4)
    return steps["with"] / steps["without"], evaluations["with"] / evaluations["without"]


def main() -> None:
    rows: list[tuple[str, ...]] = [("runs", "batch per environment", "step", "evaluation")]
    for n_runs, batch_size, repeats in ((1, 512, 20), (1, 64, 40), (8, 64, 20)):
        ratios = measure(n_runs, batch_size, repeats)
        rows.append((str(n_runs), str(batch_size), *(f"{ratio:.2f}" for ratio in ratios)))
    print_rows("Spirals MLP (width 256, depth 3), 16 environments: SAND-mask with diagnostics over without", rows)


if __name__ == "__main__":
    main()
