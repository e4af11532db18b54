"""Ratios of medians, measured alternately in one process, after warm-up."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Action = Callable[[], object]


def machine() -> str:
    """The machine and the torch that a figure belongs to."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}; Python {platform.python_version()}"


def seconds_of(action: Action) -> float:
    """Wall-clock seconds of one call, until the device has finished."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def alternate(actions: Mapping[str, Action], repeats: int, warmup: int = 3, calls: int = 1) -> dict[str, float]:
    """Median seconds of each action; they take turns, so that all see the same machine.

    With `calls` above 1 an action is called so often in a row for each reading: what a busy device needs for it,
    without the wait for the first launch.
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
    """A Markdown table; the first row is its head."""
    print(f"\n### {title}\n\n{machine()}\n")
    for i, row in enumerate(rows):
        print("| " + " | ".join(row) + " |")
        if i == 0:
            print("|" + "---|" * len(row))
