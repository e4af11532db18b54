"""A sweep as it goes: a table that renews itself in a terminal, a line now and then elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer

from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from sandmask.reports import Table
    from sandmask.sweeps import SweepStatus

LINE_SECONDS = 10.0  # between lines where there is no terminal
LOOK_SECONDS = 1.0


def duration(seconds: float | None) -> str:
    """Seconds in words: 45 s, 12 min, 3 h 20 min."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def headline(status: "SweepStatus") -> str:
    """The state of a sweep in one line."""
    parts = [f"{status.done}/{status.planned} runs done"]
    if status.running:
        parts.append(f"{status.running} running in {len(status.stacks)} stack{'s' * (len(status.stacks) != 1)}")
    if status.rate:
        parts.append(f"{status.rate:,.0f} run-steps/s")
    if status.rate and status.done < status.planned:
        parts.append(f"{duration(status.seconds_left)} left")
    return ", ".join(parts)


def standings(status: "SweepStatus") -> str:
    """The table so far in one line."""
    datasets = {row.dataset for row in status.standings}
    shown = [
        f"{row.algorithm}{f' on {row.dataset}' if len(datasets) > 1 else ''} {row.accuracy:.1%}"
        for row in status.standings
    ]
    return "held out, so far: " + ", ".join(shown) if shown else ""


def view(status: "SweepStatus", width: int = 24) -> Any:
    """The state of a sweep as a rich renderable."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    share = status.run_steps_done / status.run_steps if status.run_steps else 0.0
    lines: list[Any] = [Text(f"{bar(share, 2 * width)} {share:4.0%}  {headline(status)}")]
    if status.stacks:
        table = Table(box=None, pad_edge=False, show_header=False)
        for stack in status.stacks[:20]:
            table.add_row(
                f"  {stack.dataset} {stack.algorithm}",
                f"{stack.runs} runs",
                bar(stack.done / stack.steps, width),
                f"step {stack.done}/{stack.steps}",
                f"{stack.rate:,.0f} run-steps/s",
                stack.device,
            )
        lines.append(table)
    if said := standings(status):
        lines.append(Text(said))
    return Group(*lines)


def bar(share: float, width: int) -> str:
    """A bar of `width` characters."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return "━" * full + "╌" * (width - full)


class SweepDisplay:
    """Looks into a sweep's folder from a thread of its own, and shows what it finds on standard error."""

    def __init__(self, look: Callable[[], "SweepStatus"], *, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.live import Live

        self._look, self.quiet = look, quiet
        self._live: Live | None = None
        if sys.stderr.isatty() and not quiet:
            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        if not self.quiet:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if not self.quiet:
            self._thread.join()
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line above the table."""
        if self.quiet:
            return
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            typer.echo(text, err=True)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(LOOK_SECONDS):
            with suppress(SandmaskError, OSError):  # a damaged file: the sweep itself will meet it, and say so
                if self._live:
                    self._live.update(view(self._look()), refresh=True)
                elif time.monotonic() - last > LINE_SECONDS:
                    last = time.monotonic()
                    self._lines(self._look())

    @staticmethod
    def _lines(status: "SweepStatus") -> None:
        for line in (headline(status), standings(status)):
            if line:
                typer.echo(line, err=True)


def result_rows(folder: Any, rules: Sequence[str]) -> list[tuple[str, ...]]:
    """Averages over environments of what a sweep has, a row for each dataset and method, a column a rule."""
    from sandmask.records import read_runs
    from sandmask.reports import build_report, cell_text

    report = build_report(read_runs(folder), rules)
    rows: dict[tuple[str, str], list[str]] = {}
    for place, rule in enumerate(report.rules):
        for dataset, table in rule.datasets.items():
            for method in table.methods:
                cells = rows.setdefault((dataset, method), ["-"] * len(report.rules))
                average = table.averages[method]
                cells[place] = cell_text(average) if average.complete else _of_some(table, method)
    return [(*key, *cells) for key, cells in rows.items()]


def _of_some(table: "Table", method: str) -> str:
    """The mean over those held-out environments that a sweep was asked for, with their number."""
    found = [table.cells[method, column].mean for column in table.columns]
    means = [mean for mean in found if mean is not None]
    return f"{sum(means) / len(means):.1f} (of {len(means)})" if means else "-"
