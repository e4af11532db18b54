"""The progress of a run or a sweep: in a terminal, in a notebook, as lines of a log, or not at all."""

import html
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal, Self, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    track,
)
from rich.table import Column, Table
from rich.text import Text

from sandmask._text import counted, duration, printable, tell
from sandmask.errors import SandmaskError
from sandmask.records import RunSpec
from sandmask.sweeps import SweepStatus
from sandmask.training import Accuracies
from sandmask.training import Progress as Report
from sandmask.training.keeping import training_mean

T = TypeVar("T")
# True shows progress in a terminal or a notebook; "lines" also prints lines elsewhere.
ShowProgress = bool | Literal["lines"]
Screen = Literal["terminal", "notebook", "lines", "none"]


def choose_screen(progress: ShowProgress) -> Screen:
    """Choose where progress is shown."""
    if progress not in (True, False, "lines"):
        raise SandmaskError(f"progress should be True, False or 'lines'. Found {progress!r}.")
    if not progress:
        return "none"
    if Console().is_jupyter:
        return "notebook"
    if sys.stderr is not None and sys.stderr.isatty():
        return "terminal"
    return "lines" if progress == "lines" else "none"


def say_on(screen: Screen, text: str) -> None:
    """Print a line on standard error; in notebooks on standard output, because they mark standard error as errors."""
    if screen == "notebook":
        sys.stdout.write(f"{text}\n")
    elif screen != "none":
        tell(text)


class NotebookText:
    """Text in the output of a notebook's cell, which `show` replaces. It works without widgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Show `text` instead of what was shown before."""
        data = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._handle is None:
            display: Any = import_module("IPython.display")
            self._handle = display.display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


LINE_SECONDS = 10.0  # between lines of a log
NOTEBOOK_SECONDS = 0.25  # between updates of a notebook
EVALUATION_SECONDS = 1.0  # after which the progress of an evaluation is shown


def one_by_one(items: Sequence[T], name: str, screen: Screen) -> Iterator[T]:
    """Iterate over items, and show how many are done."""
    if screen == "terminal":
        yield from track(items, name, console=Console(stderr=True), transient=True)
        return
    last_line = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - last_line >= LINE_SECONDS:
            say_on(screen, f"{done}/{len(items)} {name}")
            last_line = time.monotonic()
        yield item


class _Status(ProgressColumn):
    """Loss, accuracies and rate, which a narrow terminal cuts off first."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["status"], no_wrap=True, overflow="ellipsis")


class TrainingBar:
    """Shows the steps, loss, accuracies and rate of a run. Pass `update` to the loop as `on_progress`."""

    def __init__(self, spec: RunSpec, screen: Screen) -> None:
        self.spec, self.screen = spec, screen
        self.status = ""
        self._first: tuple[float, int] | None = None
        self._last_line = time.monotonic()
        self._done = 0
        self._evaluation = (0.0, 0)  # the start of the current one, and the examples done
        self._text = NotebookText()
        self._bar: Progress | None = None
        if screen == "terminal":
            columns = (
                TextColumn(spec.algorithm),
                BarColumn(bar_width=10),
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                TimeRemainingColumn(table_column=Column(no_wrap=True)),
                _Status(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("train", total=spec.steps, status="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, report: Report) -> None:
        """Show a report of the loop."""
        if self.screen == "none":
            return
        now = time.monotonic()
        self._first = self._first or (now, report.done)
        if report.accuracies is not None and report.losses is not None:
            self.status = self._describe(report.accuracies, report.losses[0])
        self._done = report.done
        is_last = report.done == report.steps and report.accuracies is not None
        start, first = self._first
        rate = f"  {(report.done - first) / (now - start):.1f} steps/s" if now > start and report.done > first else ""
        self._show(self.status + rate, now, at_once=is_last)

    def evaluating(self, done: int, total: int) -> None:
        """Show the progress of an evaluation that takes long."""
        now = time.monotonic()
        began, before = self._evaluation
        began = began if done > before else now
        self._evaluation = (began, done)
        if self.screen != "none" and now - began > EVALUATION_SECONDS:
            self._show(f"evaluating {done:,}/{total:,}", now)

    def _show(self, status: str, now: float, *, at_once: bool = False) -> None:
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self._done, status=status)
            return
        seconds = NOTEBOOK_SECONDS if self.screen == "notebook" else LINE_SECONDS
        if at_once or now - self._last_line > seconds:
            self._last_line = now
            line = f"{self.spec.algorithm}: step {self._done}/{self.spec.steps}  {status}"
            if self.screen == "notebook":
                self._text.show(line)
            else:
                say_on(self.screen, line)

    def _describe(self, accuracies: Accuracies, loss: float) -> str:
        held_out = list(self.spec.test_envs)
        trained = training_mean(accuracies.outside[0], self.spec)
        unseen = accuracies.inside[0, held_out].mean() if held_out else float("nan")
        return f"loss {loss:.3f}  trained {trained:.1%}  held out {unseen:.1%}"


LOOK_SECONDS = 1.0
NOTEBOOK_WIDTH = 120


def headline(status: SweepStatus) -> str:
    """The state of a sweep in one line."""
    parts = [f"{status.done}/{status.planned} runs done"]
    if status.running:
        parts.append(f"{status.running} running in {counted(len(status.stacks), 'stack')}")
    if status.rate:
        parts.append(_speed(status.rate))
    elif status.stacks:
        parts.append("starting")  # data are read and kernels compiled; the first steps are not timed either
    if status.seconds_left is not None:
        parts.append(f"{duration(status.seconds_left)} left")
    return ", ".join(parts)


def _speed(rate: float) -> str:
    return f"{rate:,.{0 if rate >= 10 else 2}f} run-steps/s"


def standings(status: SweepStatus) -> str:
    """The table so far in one line."""
    datasets = {row.dataset for row in status.standings}
    shown = [
        f"{row.algorithm}{f' on {row.dataset}' if len(datasets) > 1 else ''} {row.accuracy:.1%}"
        for row in status.standings
    ]
    return "held out, so far: " + ", ".join(shown) if shown else ""


def view(status: SweepStatus, width: int = 24) -> Any:
    """The state of a sweep as a rich renderable."""
    share = status.run_steps_done / status.run_steps if status.run_steps else 0.0
    lines: list[Any] = [Text(f"{bar(share, 2 * width)} {share:4.0%}"), Text(headline(status))]
    if status.stacks:
        table = Table(box=None, pad_edge=False, show_header=False)
        for stack in status.stacks[:20]:
            table.add_row(
                Text(f"  {printable(stack.dataset)} {stack.algorithm}"),  # a name may look like markup
                counted(stack.runs, "run"),
                bar(stack.done / stack.steps, width),
                f"step {stack.done}/{stack.steps}",
                _speed(stack.rate) if stack.rate else "starting",
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
    """Shows the status of a sweep, from a thread of its own."""

    def __init__(self, look: Callable[[], SweepStatus], screen: Screen) -> None:
        self._look, self.screen = look, screen
        self._live: Live | None = None
        if screen == "terminal":
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

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.screen != "none":
            self._thread.join()
        if self._live:
            self._live.stop()
        if self.screen == "notebook":  # the last state stays visible
            self._show()

    def say(self, text: str) -> None:
        """Print a line above the table."""
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            say_on(self.screen, text)

    def _watch(self) -> None:
        while not self._ended.wait(LINE_SECONDS if self.screen == "lines" else LOOK_SECONDS):
            self._show()

    def _show(self) -> None:
        """Show the state of the sweep. Errors while reading it are ignored, because the sweep itself reports them."""
        with suppress(SandmaskError, OSError):
            status = self._look()
            if self._live:
                self._live.update(view(status), refresh=True)
            elif self.screen == "notebook":
                self._text.show(_plain(status))
            else:
                for line in filter(None, (headline(status), standings(status))):
                    say_on(self.screen, line)


def _plain(status: SweepStatus) -> str:
    """The view of a terminal as plain text."""
    console = Console(file=io.StringIO(), width=NOTEBOOK_WIDTH, force_terminal=False, force_jupyter=False)
    with console.capture() as captured:
        console.print(view(status))
    return captured.get().rstrip()
