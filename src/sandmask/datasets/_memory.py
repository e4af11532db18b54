"""Where decoded images are kept: on the device, in memory, or nowhere."""

from typing import Literal

import torch

from sandmask._memory import free_memory

CacheMode = Literal["auto", "device", "memory", "none"]
CACHE_MODES: tuple[CacheMode, ...] = ("auto", "device", "memory", "none")

MEMORY_SHARE = 0.6  # of the memory that is free
FALLBACK = 8 * 2**30  # taken to be free where the system does not say
DEVICE_SHARE = 0.4  # of the GPU memory that is free: the network needs the rest


def place_cache(mode: CacheMode, n_bytes: int, device: torch.device) -> CacheMode:
    """What "auto" comes to for images of this many bytes: "device" if they fit there, else "memory", else
    "none".

    On the CPU, "device" and "memory" are the same and are called "memory".
    """
    if mode == "device" and device.type == "cpu":
        return "memory"
    if mode != "auto":
        return mode
    if device.type == "cuda" and n_bytes <= DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]:
        return "device"
    free = free_memory()
    return "memory" if n_bytes <= MEMORY_SHARE * (FALLBACK if free is None else free) else "none"
