"""Convolutional blocks whose gradients are folded into moments."""

from typing import TYPE_CHECKING

from torch import Tensor

from sandmask.functional.conv import fused_conv_block
from sandmask.functional.split import Halves

if TYPE_CHECKING:
    from sandmask.functional.tape.moment_tape import MomentTape


def taped_conv_block(
    tape: "MomentTape",
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    stride: int = 1,
    groups: int = 8,
) -> Tensor:
    """`conv_block`, where there are kernels for it."""
    tape.check_rows(x, 4)
    n_in = weight.shape[1]
    place, *others = tape.claim(weight, bias, gamma, beta)

    def fold(before: Tensor | Halves, inputs: Tensor | Halves, sums: Tensor) -> None:
        from sandmask.functional.kernels import conv_weights, norm

        if conv_weights.has_few_weights(n_in):
            parts = conv_weights.weight_parts(before, inputs, tape.n_envs, stride)
            tape.fold(place, lambda runs: parts[runs].sum(2))
        else:
            conv_weights.weight_moments(before, inputs, tape.unscale, tape.n_envs, stride, *tape.target(place))
        of_bias, of_gamma, of_beta = (begin for begin, _ in others)
        norm.sample_moments(sums, tape.unscale, tape.n_envs, tape.target(*others), (of_bias, of_gamma, of_beta))

    return fused_conv_block(x, weight, bias, gamma, beta, stride, groups, fold)
