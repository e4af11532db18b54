"""Differences between kinds of devices."""

import torch

_WITHOUT_FLOAT64 = {"mps"}


def widest_float(device: torch.device) -> torch.dtype:
    """Float64, or float32 on a device without float64, such as Apple's GPUs."""
    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64
