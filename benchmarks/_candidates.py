"""Candidates for the constants of kernels, such as their tiles: each is temporarily set, checked and timed."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks._measure import alternate, seconds_of
from sandmask.functional.kernels.tiles import SPLIT

REPEATS, SECONDS, MOST_CALLS = 5, 0.004, 20  # readings, seconds of each, and calls in it
AS_EXACT = 1.05  # largest error of a candidate that may replace the present constants, relative to their error


@dataclass(frozen=True)
class Constant:
    """A constant of a kernel's module, or the entry of a table there."""

    module: ModuleType
    name: str
    key: int | None = None  # the kind of numbers, if the constant is a table

    def __str__(self) -> str:
        where = f"{self.module.__name__.removeprefix('sandmask.functional.')}.{self.name}"
        return where if self.key is None else f"{where}[{'SPLIT' if self.key == SPLIT else self.key}]"

    def get(self) -> Any:
        found = getattr(self.module, self.name)
        return found if self.key is None else found[self.key]

    def set(self, value: Any) -> None:
        if self.key is None:
            setattr(self.module, self.name, value)
        else:
            getattr(self.module, self.name)[self.key] = value


def last_run(found: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the last run's part of results [K, ...]."""
    return tuple(part[-1] for part in ([found] if isinstance(found, Tensor) else found))


def _or(value: Any, other: Any) -> Any:
    return other if value is None else value


@dataclass(frozen=True)
class Case:
    """One or more launches of a training step, their constants, and other values of these constants."""

    name: str
    constants: tuple[Constant, ...]
    candidates: Sequence[tuple[Any, ...]]  # a value for every constant; None keeps the present one
    launch: Callable[[], Any]
    exact: Callable[[], tuple[Tensor, ...]]  # the last run's results in float64
    limit: float  # of the relative error
    results: Callable[[Any], tuple[Tensor, ...]] = last_run  # extracts the results from what `launch` returns
    written: tuple[Tensor, ...] = ()  # tensors that `launch` writes into

    def all_values(self) -> Iterator[tuple[Any, ...]]:
        """Yield the present values, then the candidates."""
        present = tuple(constant.get() for constant in self.constants)
        found = [tuple(map(_or, values, present)) for values in self.candidates]
        yield from dict.fromkeys([present, *found])


@dataclass(frozen=True)
class Reading:
    """A measurement with some values of a case's constants."""

    case: str
    setting: str
    microseconds: float  # per run; 0 if it did not run
    error: float
    remark: str  # why it cannot be used, or empty

    def row(self) -> tuple[str, ...]:
        time, error = (f"{self.microseconds:.3f}", f"{self.error:.1e}") if self.microseconds else ("", "")
        return self.case, self.setting, time, error, self.remark or "yes"


@contextmanager
def set_to(constants: Sequence[Constant], values: Sequence[Any]) -> Iterator[None]:
    """Set constants temporarily."""
    before = [constant.get() for constant in constants]
    try:
        for constant, value in zip(constants, values, strict=True):
            constant.set(value)
        yield
    finally:
        for constant, value in zip(constants, before, strict=True):
            constant.set(value)


def setting_of(constants: Sequence[Constant], values: Sequence[Any]) -> str:
    """Format values as assignments in the modules."""
    return ", ".join(
        f"{constant} = {tuple(value) if isinstance(value, tuple) else value}"
        for constant, value in zip(constants, values, strict=True)
    )


def measure(case: Case, n_runs: int) -> Iterator[Reading]:
    """Yield readings of the present values, of the candidates, and again of the present values."""
    exact = case.exact()
    values = list(case.all_values())
    for chosen in (*values, values[0]):
        setting = setting_of(case.constants, chosen)
        with set_to(case.constants, chosen):
            try:
                error = _error(case, exact)
                seconds = _seconds(case.launch)
            except OutOfResources as problem:
                yield Reading(case.name, setting, 0.0, 0.0, f"does not fit: {problem}"[:80])
            except Exception as problem:  # noqa: BLE001 - continue with the others
                yield Reading(case.name, setting, 0.0, 0.0, f"{type(problem).__name__}: {problem}"[:80])
            else:
                remark = "" if error <= case.limit else "no"
                yield Reading(case.name, setting, 1e6 * seconds / n_runs, error, remark)


def repeated(count: int, launch: Callable[[], Any]) -> Any:
    """Launch as often as a step does, and return the result of the last launch."""
    found = launch()
    for _ in range(count - 1):
        found = launch()
    return found


def launch_once(case: Case, values: tuple[Any, ...]) -> None:
    """Compile a candidate's kernels, which stores them in Triton's cache."""
    with set_to(case.constants, values):
        try:
            case.launch()
        except Exception as problem:  # noqa: BLE001 - `measure` reports it
            print(f"{case.name}: {setting_of(case.constants, values)}: {problem}"[:200], flush=True)


def _error(case: Case, exact: tuple[Tensor, ...]) -> float:
    """Return the largest relative error of a case's results; infinite if one is NaN or was not written."""
    for tensor in case.written:
        tensor.fill_(torch.nan)
    found = case.results(case.launch())
    errors = [
        float((one.double() - two).norm() / two.norm().clamp_min(torch.finfo(torch.float64).tiny))
        for one, two in zip(found, exact, strict=True)
    ]
    return max(math.inf if math.isnan(error) else error for error in errors)


def _seconds(launch: Callable[[], Any]) -> float:
    seconds_of(launch)
    once = seconds_of(launch)
    calls = max(1, min(MOST_CALLS, round(SECONDS / once)))
    return alternate({"": launch}, repeats=REPEATS, warmup=1, calls=calls)[""]


def ranked(readings: Sequence[Reading]) -> list[Reading]:
    """Sort readings by time. Those that did not run or are wrong come last."""
    return sorted(readings, key=lambda reading: (bool(reading.remark), reading.microseconds))


def verdict(readings: Sequence[Reading]) -> str:
    """Say which constants to change, from the readings of one case in the order of `measure`."""
    present, again = readings[0], readings[-1]
    if present.remark or again.remark:
        return f"{present.case}: the present constants do not run, or are wrong: {present.remark or again.remark}"
    before = min(present.microseconds, again.microseconds)
    spread = abs(present.microseconds - again.microseconds)
    usable = [one for one in readings if not one.remark and one.setting != present.setting]
    exact = [one for one in usable if one.error <= AS_EXACT * present.error]
    told = f"{present.case}: {before:.3f} microseconds now (two readings differ by {spread:.3f})"
    lines: list[str] = []
    for name, found in (("as exact", exact), ("less exact", usable)):
        best = min(found, key=lambda one: one.microseconds, default=None)
        if best is not None and best.microseconds < before - spread:
            gain, error = before - best.microseconds, f"error {best.error:.1e} instead of {present.error:.1e}"
            line = f"set {best.setting}: {best.microseconds:.3f}, saves {gain:.3f}, {error}"
            if line not in "".join(lines):
                lines.append(f"  {name}: {line}")
    return "\n".join([told, *(lines or ["  keep the present constants"])])
