"""Free memory and cores of the machine, within the limits of its control groups (containers), and memory errors."""

import os
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes of main memory that this process can still allocate; None if the system does not report it."""
    limits = (read_accounts(_PROC / "meminfo", "MemAvailable"), *_free_in_groups())
    known = [free for free in limits if free is not None]
    return max(min(known), 0) if known else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. On a GPU, the error's type says so, and on a CPU its message. Torch is not imported."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def usable_cores() -> int:
    """The number of cores that this process may run on, which a batch system may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_accounts(file: Path, name: str) -> int | None:
    """A value in bytes from a file of Linux, such as VmRSS from /proc/self/status; None if it is not there."""
    kilobytes = (line.split()[1] for line in _lines(file) if line.startswith(f"{name}:"))
    return next((int(number) * 1024 for number in kilobytes), None)


def _free_in_groups() -> list[int | None]:
    """The memory left in the control group of the process and in each group above it, which may also have limits."""
    free: list[int | None] = []
    for line in _lines(_PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = _CGROUPS / "memory" if controllers else _CGROUPS
        own = base / path.lstrip("/")
        groups = [own, *own.parents[: len(own.parts) - len(base.parts)]]
        free += [_free_in(group) for group in groups]
    return free


def _free_in(group: Path) -> int | None:
    """The memory left in one group, of version 2 or 1. File caches count as free."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _number(group / limit_name), _number(group / used_name)
        if limit is not None and used is not None:
            caches = [line.split()[1] for line in _lines(group / "memory.stat") if line.startswith("inactive_file ")]
            return limit - used + (int(caches[0]) if caches else 0)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is no limit, or it is "max"
        return None
