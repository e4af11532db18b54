"""How matrix products are cut into tiles by the kernels that compute them."""

from typing import Any, NamedTuple

import torch
import triton


class Tiles(NamedTuple):
    """How much of a product one program computes, and how many steps of it are fetched ahead."""

    rows: int  # pixels; of weights, outputs
    columns: int  # output channels; of a gradient, inputs
    depth: int  # what is summed over at a time
    warps: int
    stages: int


def how(tiles: Tiles) -> dict[str, Any]:
    """What a launch has to be told beside the sizes of its tiles."""
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return {"precision": precision, "num_warps": tiles.warps, "num_stages": tiles.stages}


def at_most(most: int, size: int) -> int:
    """A power of 2 that covers `size` where that is less: products want at least 16."""
    return min(most, max(int(triton.next_power_of_2(size)), 16))


def dividing(most: int, size: int) -> int:
    """The largest power of 2 that divides `size`; 0 where that is less than 16."""
    found = min(most, size & -size)
    return found if found >= 16 else 0
