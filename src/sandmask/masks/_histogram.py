"""Histogram of the agreement of signs over the elements of a tensor."""

import torch
from torch import Tensor

BINS = 10


def agreement_counts(sign_sum: Tensor, count: int, bins: int = BINS) -> Tensor:
    """Count the elements of a flat tensor whose agreement A = |mean_e sign(g_e)| is in each of equal bins.

    Bin b holds b / bins <= A < (b + 1) / bins; the last bin also holds A = 1. Sums of signs are compared as whole
    numbers, so an agreement of 3/10 is in the bin that begins there. Works under `torch.func.vmap` and never waits for
    the device.

    :param sign_sum: sum over environments of sign(g).
    :param count: number of environments.
    :param bins: number of bins.
    :return: counts, `[bins]`.
    """
    scaled = sign_sum.abs() * bins
    edges = torch.arange(1, bins, device=sign_sum.device, dtype=sign_sum.dtype) * count
    above = (scaled >= edges.unsqueeze(-1)).sum(-1, dtype=sign_sum.dtype)  # elements beyond each inner edge
    ends = sign_sum.new_full((1,), sign_sum.numel()), sign_sum.new_zeros(1)
    return -torch.cat([ends[0], above, ends[1]]).diff()
