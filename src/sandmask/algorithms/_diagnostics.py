"""Diagnostics of a mask for each tensor, as one vector that a step returns with its loss."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sandmask.functional.flat import Slot
from sandmask.masks import TensorMoments, agreement_counts

DIAGNOSTICS = "diagnostics"  # the metric that is a vector; its entries go by the names below
BINS = 10


def diagnostic_names(slots: Sequence[Slot]) -> list[str]:
    """Return the names of the entries that `mask_diagnostics` computes.

    For every tensor, and for `all` tensors together:

    - `mask_density/<tensor>`: the mean of the mask;
    - `dead_fraction/<tensor>`: the share of elements whose mask is exactly 0;
    - `agreement/<tensor>/<bin>`: the share of elements whose A = |mean_e sign(g_e)| is in that tenth of 0..1.

    :param slots: places of the tensors in the flat vector.
    """

    def of(tensor: str) -> Iterator[str]:
        yield from (f"mask_density/{tensor}", f"dead_fraction/{tensor}")
        yield from (f"agreement/{tensor}/{number}" for number in range(BINS))

    return [name for tensor in (*(slot.name for slot in slots), "all") for name in of(tensor)]


def mask_diagnostics(weights: Tensor, moments: TensorMoments, slots: Sequence[Slot]) -> Tensor:
    """Compute diagnostics of a mask as one vector; see `diagnostic_names`.

    Works under `vmap` and never waits for the device.

    :param weights: flat mask `[P]`.
    :param moments: moments that the mask was computed from.
    :param slots: places of the tensors in the flat vector.
    """
    sizes = [slot.numel for slot in slots]
    pieces = zip(torch.split(weights, sizes), torch.split(moments.sign_sum, sizes), strict=True)
    sums = [_sums(mask, signs, moments.count) for mask, signs in pieces]
    total = torch.stack(sums).sum(0)
    return torch.cat([each / numel for each, numel in zip([*sums, total], [*sizes, sum(sizes)], strict=True)])


def _sums(mask: Tensor, sign_sum: Tensor, count: int) -> Tensor:
    own = torch.stack([mask.sum(), (mask == 0).sum(dtype=mask.dtype)])
    return torch.cat([own, agreement_counts(sign_sum, count, BINS).to(mask.dtype)])
