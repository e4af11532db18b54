"""Effect of the small range of half-precision numbers on a mask: the same runs with gradients of a smaller range.

In half precision, gradients below 2^-40 of the largest are 0 and have no sign; float32 reaches 2^-126. The 16 runs of
the AND-mask's draw 14 (trial 0) are trained on a CPU in float32, with gradients of the hidden layers rounded to halves.
These are scaled by run, by environment, and by example, as the kernels of `fp32x3` do it. The runs are chaotic, so each
way is repeated with gradients whose last bits are perturbed.

python -m benchmarks.halves_range [REPEATS]     # about one minute for each of the four ways and each repeat
"""

import sys
from collections.abc import Callable
from statistics import fmean, stdev

import torch
from torch import Tensor

from benchmarks import swept
from benchmarks._measure import print_rows
from benchmarks.fast_path import train
from sandmask.functional import dense, scaling
from sandmask.functional.split import joined, plain_split
from sandmask.records import RunRecord

RECORDS, DRAW = ["results/paper/spirals.records.parquet"], 14
NUDGE = 2.0**-22
Rounding = Callable[[Tensor, int], Tensor]
exact = dense.layer_backward


def rounded(how: Rounding, seed: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a `layer_backward` that rounds gradients, and perturbs them before if the seed is not 0."""
    noise = torch.Generator().manual_seed(seed)

    def backward(
        grad: Tensor, out: Tensor | None, rate: Tensor | None, n_envs: int | None = None, roots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        before = exact(grad, out, rate, n_envs, roots)[0]
        if seed:
            before = before * (1.0 + NUDGE * torch.randn(before.shape, generator=noise))
        before = how(before, n_envs or 1)
        return before, dense.by_environment(before, n_envs or 1).sum(2)

    return backward


def in_halves(gradients: Tensor) -> Tensor:
    return joined(plain_split(gradients)).float()


def scaled(gradients: Tensor, n_envs: int, least: int | None) -> Tensor:
    """Round to halves that are scaled by environment, and with `least` also by example."""
    found, unscale, roots = scaling.plain_scale(gradients, n_envs, least)
    by_env = dense.by_environment(dense.weighted(in_halves(found), roots), n_envs)
    return (by_env * unscale[..., None, None]).view(gradients.shape)


WAYS: dict[str, Rounding] = {
    "float32": lambda gradients, _: gradients,
    "halves, scaled by run": lambda gradients, _: in_halves(gradients),
    "by run and environment": lambda gradients, n_envs: scaled(gradients, n_envs, None),
    "by run, environment and example": lambda gradients, n_envs: scaled(gradients, n_envs, scaling.LEAST),
}


def accuracies(runs: list[RunRecord], how: Rounding, seed: int) -> tuple[float, float]:
    """Return the mean accuracy on training and held-out environments in percent, over runs and checkpoints."""
    dense.layer_backward = rounded(how, seed)
    found = swept.curves(train([swept.slow(run.spec) for run in runs], "cpu"))
    return 100 * float(found["trained on"].mean()), 100 * float(found["held out"].mean())


def with_error(values: list[float]) -> str:
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{error}"


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    (runs,) = (group for group in swept.draws_of(RECORDS)["ANDMask"] if group[0].spec.hparams_seed == DRAW)
    rows: list[tuple[str, ...]] = [("gradients", "trained on", "held out")]
    for name, how in WAYS.items():
        found = [accuracies(runs, how, seed) for seed in range(repeats)]
        rows.append((name, *(with_error([pair[k] for pair in found]) for k in range(2))))
        print(*rows[-1], flush=True, file=sys.stderr)
    title = f"Spirals, ANDMask, draw {DRAW}, {len(runs)} runs: accuracy in %, mean over checkpoints"
    print_rows(f"{title}; mean and standard error of {repeats} repeats", rows)


if __name__ == "__main__":
    main()
