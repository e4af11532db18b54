"""Relative error of the gradients of a training step in each precision, against float64.

python -m benchmarks.step_error     # a GPU
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks._measure import print_rows
from sandmask.algorithms import MaskedAlgorithm
from sandmask.datasets import DATASETS, Dataset
from sandmask.functional import EnvBatch
from sandmask.training import Stack, make_spec
from sandmask.training.precision import temporary_precision
from sandmask.training.stack_step import moments_of_runs

Hparams = Mapping[str, float]
N_RUNS = 4
STEPS = 20  # training steps before the measured step


def stack_of(dataset: Dataset, hparams: Hparams, precision: str) -> Stack:
    """Make a stack of a few SAND-mask runs."""
    entry = DATASETS[dataset.name]
    specs = [
        make_spec(entry, "SANDMask", [0], hparams={**hparams, "tau": 0.5}, seed=k, precision=precision)
        for k in range(N_RUNS)
    ]
    return Stack(specs, dataset, torch.device("cuda"))


def plain_gradients(stack: Stack, vectors: Tensor, batch: EnvBatch, dtype: torch.dtype) -> Tensor:
    """Return the mean gradients over environments [K, P], computed run by run with torch's own operations."""
    algorithm, found = stack.algorithm, []
    assert isinstance(algorithm, MaskedAlgorithm)
    for k in range(len(vectors)):
        one = EnvBatch(*(field[k].to(dtype) if field.is_floating_point() else field[k] for field in batch))
        hparams = pytree.tree_map(lambda t: t[k].to(dtype), stack.hparams)  # noqa: B023
        leaf = vectors[k].to(dtype).requires_grad_()
        risks = algorithm.risks(algorithm.network.unflatten(leaf), one, hparams)
        found.append(torch.autograd.grad(risks.mean(), leaf)[0])
    return torch.stack(found)


def step_errors(dataset: Dataset, hparams: Hparams, precisions: Sequence[str]) -> dict[str, float]:
    """Return the relative error of a step's gradients in each precision. "fp32" uses torch's operations, run by run."""
    with temporary_precision("fp32"):
        stack = stack_of(dataset, hparams, "fp32")
        state = stack.init()
        batches = stack.feed(0)
        for _ in range(STEPS):
            state, _ = stack.step(state, next(batches))
        vectors, batch = state["params"], next(batches)
        exact = plain_gradients(stack, vectors, batch, torch.float64)
        errors = {"fp32": relative_error(plain_gradients(stack, vectors, batch, torch.float32), exact)}
    for precision in (name for name in precisions if name != "fp32"):
        with temporary_precision(precision):
            stack = stack_of(dataset, hparams, precision)
            assert isinstance(stack.algorithm, MaskedAlgorithm)
            moments, _, _ = moments_of_runs(stack.algorithm, {"params": vectors}, batch, stack.hparams, stack.keys)
            errors[precision] = relative_error(moments.mean, exact)
    return errors


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference divided by that of the exact gradient, as a mean over runs."""
    return float(((found.double() - exact).norm(dim=1) / exact.norm(dim=1)).mean())


def main() -> None:
    from benchmarks.stacked import digits
    from sandmask.datasets import load_dataset

    cases = {
        "Spirals, batch 128, width 256": (load_dataset("Spirals"), {"batch_size": 128, "mlp_width": 256}),
        "ConvNet, batch 64": (digits(), {"batch_size": 64}),
    }
    for name, (dataset, hparams) in cases.items():
        errors = step_errors(dataset, hparams, ["fp32x3", "tf32", "bf16"])
        rows: list[tuple[str, ...]] = [("precision", "relative error")]
        rows += [(key, f"{error:.1e}") for key, error in errors.items()]
        print_rows(f"{name}: SAND-mask, the gradients of step {STEPS + 1} against float64", rows)


if __name__ == "__main__":
    main()
