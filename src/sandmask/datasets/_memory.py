"""Where decoded images are kept: on the device, in memory, or nowhere."""

from pathlib import Path
from typing import Literal

import torch

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
    return "memory" if n_bytes <= MEMORY_SHARE * free_memory() else "none"


def free_memory() -> int:
    """Bytes of memory that this process can still take, limits of a container included."""
    free = _available_in_proc() or FALLBACK
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"))
    used = _read_number(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        free = min(free, limit - used)
    return max(free, 0)


def _available_in_proc() -> int | None:
    """Linux's own estimate, which counts memory that caches give back."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(number) * 1024 for number in kilobytes), None)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such limit, or "max"
        return None
