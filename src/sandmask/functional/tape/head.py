"""A classifier whose gradients are folded into moments."""

from typing import TYPE_CHECKING

from torch import Tensor

from sandmask.functional.head import fused_head

if TYPE_CHECKING:
    from sandmask.functional.tape.moment_tape import MomentTape


def taped_head(tape: "MomentTape", x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`head`, where there are kernels for it."""
    tape.check_rows(x, 2)
    of_weight, of_bias = tape.claim(weight, bias)

    def fold(sums: Tensor, grad: Tensor) -> None:
        by_env = grad.view(len(grad), tape.n_envs, -1, grad.shape[2])
        tape.fold(of_weight, lambda runs: sums[runs])
        tape.fold(of_bias, lambda runs: by_env[runs].sum(2))

    return fused_head(x, weight, bias, tape.n_envs, fold)
