"""Tiles of the kernels that train K runs: the time and the error of each kernel with several of them.

python -m benchmarks.tiles [spirals] [convnet] [norm] [FILE]     # needs a GPU; default: all; about a minute each
python -m benchmarks.tiles spirals quick                         # if Triton's cache has the compiled kernels

Kernels have the shapes of `stacked`: on Spirals 256 runs of the MLP in fp32x3, on the ConvNet 3, 16 and 44 runs in bf16
and fp32x3. A kernel's launch function runs with its present constants, with each candidate, and with the present ones
again. The two readings of the present constants show how reliable the times are. Times are those of a training step
without evaluations, and errors are those of the last run against float64. Every line is printed, and appended to FILE,
as soon as it is known. The last lines of a section say which constants of `sandmask.functional` to change, and what
that saves. A faster candidate that is less exact is named separately: before it becomes the default, measure the error
of a step with `step_error`.
"""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import _tiles_convnet as convnet
from benchmarks import _tiles_norm as norm
from benchmarks import _tiles_spirals as spirals
from benchmarks._candidates import Case, Reading, launch_once, measure, ranked, verdict
from benchmarks._measure import machine
from sandmask.functional.kernels.tiles import SPLIT
from sandmask.training.precision import Precision, temporary_precision

SECTIONS = ("spirals", "convnet", "norm")
PROCESSES = 16  # processes that compile
HEADS = ("kernel", "constants", "microseconds per run-step", "relative error", "agrees with float64")


class Plan(NamedTuple):
    """Cases of some sizes, and the precision in which they run."""

    precision: Precision
    cases: Callable[[Any], Iterator[Case]]
    sizes: Any


def plans(section: str) -> list[Plan]:
    """Return what a section measures."""
    if section == "spirals":
        return [Plan("fp32x3", spirals.cases, spirals.Sizes())]
    if section == "norm":
        return [Plan("bf16", norm.cases, norm.Sizes()), Plan("fp32x3", norm.cases, norm.Sizes(bytes=4))]
    by_kind: list[tuple[Precision, int]] = [("bf16", 2), ("fp32x3", SPLIT)]
    sizes = [(precision, convnet.Sizes(n_runs, kind)) for precision, kind in by_kind for n_runs in (3, 16, 44)]
    return [Plan(precision, convnet.cases, size) for precision, size in sizes]


class Log:
    """A log whose lines are printed, and appended to a file, at once."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def __call__(self, line: str) -> None:
        """Add a line."""
        print(line, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(line + "\n")


def compile_all(section: str, log: Log) -> None:
    """Compile all candidates of a section, several at a time."""
    start = time.monotonic()
    try:
        with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
            list(pool.map(compile_some, range(PROCESSES), [section] * PROCESSES))
    except Exception as problem:  # noqa: BLE001 - the others are compiled when measured
        log(f"Not all are compiled: {type(problem).__name__}: {problem}"[:200])
    log(f"{time.monotonic() - start:.0f} seconds to compile\n")


def compile_some(part: int, section: str) -> None:
    """Launch every `PROCESSES`-th candidate with two runs, which stores its kernels in Triton's cache."""
    found = [plan._replace(sizes=plan.sizes._replace(n_runs=2)) for plan in plans(section)]
    number = 0
    for precision, cases, sizes in dict.fromkeys(found):
        with temporary_precision(precision):
            for case in cases(sizes):
                for values in case.all_values():
                    number += 1
                    if number % PROCESSES == part:
                        launch_once(case, values)


def measured(plan: Plan, log: Log) -> Iterator[list[Reading]]:
    """Yield the readings of each case."""
    with temporary_precision(plan.precision):
        for case in plan.cases(plan.sizes):
            group = []
            for reading in measure(case, plan.sizes.n_runs):
                group.append(reading)
                log("| " + " | ".join(reading.row()) + " |")
            yield group


def run(found: list[Plan], log: Log) -> None:
    """Measure all cases, and print what to change."""
    log("| " + " | ".join(HEADS) + " |")
    log("|" + "---|" * len(HEADS))
    readings: list[list[Reading]] = []
    for plan in found:
        try:
            for group in measured(plan, log):
                readings += [group]
        except Exception as problem:  # noqa: BLE001 - continue with the others
            log(f"{plan.sizes}: {type(problem).__name__}: {problem}"[:300])
    log("\nFastest first:")
    for group in readings:
        log(f"\n{group[0].case}")
        for reading in ranked(group):
            log("  " + "  ".join(reading.row()[2:]) + f"  {reading.setting}")
    log("\nWhat to change:\n")
    for group in readings:
        log(verdict(group))


def main() -> None:
    if not torch.cuda.is_available():
        print("tiles: needs a CUDA device; skipped.")
        return
    start = time.monotonic()
    words = sys.argv[1:]
    sections = [name for name in SECTIONS if name in words] or list(SECTIONS)
    paths = [Path(word) for word in words if word not in (*SECTIONS, "all", "quick")]
    log = Log(paths[0] if paths else None)
    for name in sections:
        log(f"\n### Tiles: {name}\n\n{machine()}\n")
        if "quick" not in words:
            compile_all(name, log)
        run(plans(name), log)
    log(f"\n{time.monotonic() - start:.0f} seconds in all.")


if __name__ == "__main__":
    main()
