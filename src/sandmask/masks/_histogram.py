"""How the agreement of signs is spread over the elements of a tensor."""

import torch
from torch import Tensor

BINS = 10


def agreement_counts(sign_sum: Tensor, count: int, bins: int = BINS) -> Tensor:
    """How many elements of a flat tensor have their agreement A = |mean_e sign(g_e)| in each of equal bins: [bins].

    Bin b holds b / bins <= A < (b + 1) / bins, and the last one A = 1 as well. Sums of signs are whole numbers and
    are compared as such: an agreement of 3/10 is in the bin that begins there, whatever 3/10 is in binary.

    It works under `torch.func.vmap`, and never waits for the device.
    """
    scaled = sign_sum.abs() * bins
    edges = torch.arange(1, bins, device=sign_sum.device, dtype=sign_sum.dtype) * count
    above = (scaled >= edges.unsqueeze(-1)).sum(-1, dtype=sign_sum.dtype)  # elements beyond each inner edge
    ends = sign_sum.new_full((1,), sign_sum.numel()), sign_sum.new_zeros(1)
    return -torch.cat([ends[0], above, ends[1]]).diff()
