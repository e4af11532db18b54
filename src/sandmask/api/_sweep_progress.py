"""Progress of a sweep: a table that is replaced in a terminal or a notebook, lines of a log elsewhere."""

import io
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sandmask.api._progress import NotebookText, ShowProgress, choose_screen, say_on
from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from sandmask.sweeps import SweepStatus

LINE_SECONDS = 10.0  # between lines of a log
LOOK_SECONDS = 1.0
NOTEBOOK_WIDTH = 120


def duration(seconds: float | None) -> str:
    """Format a duration: 45 s, 12 min, 3 h 20 min."""
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
    """Looks into a sweep's folder from a thread of its own, and shows what it finds."""

    def __init__(self, look: Callable[[], "SweepStatus"], progress: ShowProgress = "lines") -> None:
        self._look, self.screen = look, choose_screen(progress)
        self._live: Live | None = None
        if self.screen == "terminal":
            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        self._text = NotebookText()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        if self.screen != "none":
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self.screen != "none":
            self._thread.join()
        if self._live:
            self._live.stop()
        if self.screen == "notebook":  # where the last state stays
            self._show()

    def say(self, text: str) -> None:
        """Print a line above the table."""
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            say_on(self.screen, text)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(LOOK_SECONDS):
            if self.screen != "lines":
                self._show()
            elif time.monotonic() - last > LINE_SECONDS:
                last = time.monotonic()
                self._show()

    def _show(self) -> None:
        """Show the state of the sweep. The sweep itself reports a damaged file, so the display ignores it."""
        with suppress(SandmaskError, OSError):
            status = self._look()
            if self._live:
                self._live.update(view(status), refresh=True)
            elif self.screen == "notebook":
                self._text.show(_plain(status))
            else:
                for line in filter(None, (headline(status), standings(status))):
                    say_on(self.screen, line)


def _plain(status: "SweepStatus") -> str:
    """The view of a terminal as plain text."""
    console = Console(file=io.StringIO(), width=NOTEBOOK_WIDTH, force_terminal=False, force_jupyter=False)
    with console.capture() as captured:
        console.print(view(status))
    return captured.get().rstrip()
