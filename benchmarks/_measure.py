"""Measure median times of actions, which take turns in one process after a warm-up."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Action = Callable[[], object]


def machine() -> str:
    """Describe the machine and the versions of torch and Python."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}; Python {platform.python_version()}"


def seconds_of(action: Action) -> float:
    """Measure wall-clock seconds of one call, until the device has finished."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def alternate(actions: Mapping[str, Action], repeats: int, warmup: int = 3, calls: int = 1) -> dict[str, float]:
    """Measure median seconds of each action. The actions take turns, so that other load affects them equally.

    With `calls` above 1, each reading is the mean of this many calls in a row. It is the time on a busy device, without
    the latency of the first launch.
    """
    if calls > 1:
        many = {name: lambda action=action: [action() for _ in range(calls)] for name, action in actions.items()}
        return {name: seconds / calls for name, seconds in alternate(many, repeats, warmup).items()}
    for _ in range(warmup):
        for action in actions.values():
            seconds_of(action)
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            times[name].append(seconds_of(action))
    return {name: statistics.median(values) for name, values in times.items()}


def print_rows(title: str, rows: list[tuple[str, ...]]) -> None:
    """Print a Markdown table. The first row is its header."""
    print(f"\n### {title}\n\n{machine()}\n")
    for i, row in enumerate(rows):
        print("| " + " | ".join(row) + " |")
        if i == 0:
            print("|" + "---|" * len(row))
