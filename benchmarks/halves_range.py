"""What the small range of halves does to a mask: the same runs with gradients of a smaller range.

In `fp32x3`, gradients below 2^-40 of the largest are 0 and have no sign; float32 reaches 2^-126. The 16 runs of the
AND-mask's draw 14 (trial 0) are trained on a CPU in float32, with gradients of the hidden layers rounded as in
`fp32x3`, and as they would be if only their range were limited.

python -m benchmarks.halves_range     # about ten minutes
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import swept
from benchmarks._measure import print_rows
from benchmarks.fast_path import Curves, train
from sandmask.functional import dense
from sandmask.functional.split import joined, plain_split

RECORDS, DRAW = "results/paper/spirals_fp32x3.records.parquet", 14
Rounding = Callable[[Tensor, int], Tensor]
exact = dense.layer_backward


def rounded(how: Rounding) -> Callable[..., tuple[Tensor, Tensor]]:
    """`layer_backward` with gradients that are rounded."""

    def backward(
        grad: Tensor, out: Tensor | None, rate: Tensor | None, n_envs: int | None = None
    ) -> tuple[Tensor, Tensor]:
        before = how(exact(grad, out, rate, n_envs)[0], n_envs or 1)
        return before, dense.by_environment(before, n_envs or 1).sum(2)

    return backward


def above(gradients: Tensor, largest: Tensor, bits: int) -> Tensor:
    """The gradients, with zeros for those below 2^-bits of the largest."""
    return torch.where(gradients.abs() < largest * 2.0**-bits, 0.0, gradients)


def in_halves(gradients: Tensor, _: int) -> Tensor:
    """As the kernels of `fp32x3` have them."""
    return joined(plain_split(gradients)).float()


def of_run(gradients: Tensor, _: int) -> Tensor:
    """Above 2^-40 of the largest of a run."""
    return above(gradients, gradients.abs().amax((1, 2), keepdim=True), 40)


def of_environment(gradients: Tensor, n_envs: int, bits: int) -> Tensor:
    """Above 2^-bits of the largest of an environment: its gradients are scaled by themselves."""
    apart = dense.by_environment(gradients, n_envs)
    return above(apart, apart.abs().amax((2, 3), keepdim=True), bits).view(gradients.shape)


def main() -> None:
    (runs,) = (group for group in swept.draws_of(RECORDS)["ANDMask"] if group[0].spec.hparams_seed == DRAW)
    ways: dict[str, Rounding | None] = {
        "float32": None,
        "halves": in_halves,
        "above 2^-40 of a run's largest": of_run,
        **{f"above 2^-{bits} of an environment's largest": partial(of_environment, bits=bits) for bits in (40, 51, 75)},
    }
    rows: list[tuple[str, ...]] = [("gradients", "trained on", "minus float32", "held out")]
    plain: Curves | None = None
    for name, how in ways.items():
        dense.layer_backward = exact if how is None else rounded(how)
        found = swept.curves(train([swept.slow(run.spec) for run in runs], "cpu"))
        on, held_out = 100 * found["trained on"], 100 * found["held out"]
        plain = on if plain is None else plain
        gap = (on - plain).mean(1)
        difference = f"{gap.mean():+.2f} ± {gap.std(ddof=1) / len(gap) ** 0.5:.2f}"
        rows.append((name, f"{on.mean():.2f}", difference, f"{held_out.mean():.2f}"))
        print(*rows[-1], flush=True)
    print_rows(f"Spirals, ANDMask, draw {DRAW}, {len(runs)} runs: accuracy in %, mean over checkpoints", rows)


if __name__ == "__main__":
    main()
