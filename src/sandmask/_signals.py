"""Convert SIGTERM to an exception, so that a program saves its work as after Ctrl-C, and defer signals."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from sandmask._text import tell
from sandmask._torchrun import is_first

INTERRUPTED = 128 + signal.SIGINT  # the exit status after Ctrl-C, as a shell shows it
TERMINATED = 128 + signal.SIGTERM  # the exit status after SIGTERM


class TerminatedError(KeyboardInterrupt):
    """The process received SIGTERM. As a `KeyboardInterrupt`, it is handled wherever Ctrl-C is."""


def exit_status(error: KeyboardInterrupt) -> int:
    """The exit status of a program that stops because of `error`."""
    return TERMINATED if isinstance(error, TerminatedError) else INTERRUPTED


_raises: set[object] = set()  # the contexts in which a SIGTERM is to raise


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise `TerminatedError` in the main thread when SIGTERM arrives; the previous handler is restored at the end.

    Only the first SIGTERM raises: a scheduler may send several, and none of them should interrupt the saving that the
    first one started. A process that ignores SIGTERM keeps ignoring it. A child process that is forked inside the block
    ends at SIGTERM, as if there were no handler. Outside the main thread, where Python allows no handlers, this context
    does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return
    process, mine = os.getpid(), object()
    _raises.add(mine)

    def terminate(number: int, _: FrameType | None) -> None:
        if os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif mine in _raises:
            _raises.remove(mine)
            raise TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        _raises.discard(mine)
        # None stands for a handler that was not installed from Python, which cannot be restored.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


SLOW_SECONDS = 0.5  # after the last check for signals, from which on a message says that Ctrl-C has to wait
_arrived: list[int] = []  # deferred signals
_looked = [0.0]  # when `stop_requested` was last called


@contextmanager
def deferred(*numbers: int) -> Iterator[None]:
    """Hold back these signals during the block, and deliver them to their former handlers at its end.

    Code in the block checks `stop_requested` between steps, saves its work and returns: a batch system sends SIGTERM to
    all processes of a job some seconds before it kills them. A second Ctrl-C interrupts at once; during a long step,
    such as the first one with a compiler, the first Ctrl-C prints a line that says so. Outside the main thread, where
    Python allows no handlers, this context does nothing.

    :param numbers: the signals, such as `signal.SIGTERM`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _looked[0] = time.monotonic()
    former = {number: signal.signal(number, _defer) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in [number for number in numbers if number in _arrived]:
            _arrived[:] = [other for other in _arrived if other != number]
            signal.raise_signal(number)


def _defer(number: int, _: FrameType | None) -> None:
    if number == signal.SIGINT and number in _arrived:
        raise KeyboardInterrupt
    _arrived.append(number)
    if number == signal.SIGINT and time.monotonic() - _looked[0] > SLOW_SECONDS and is_first():
        with suppress(RuntimeError):  # Python refuses this if the signal interrupted another print
            tell("Finishing the current step. Press Ctrl-C again to stop now.")


def stop_requested() -> int:
    """Return the deferred signal that has arrived, or 0 if there is none."""
    _looked[0] = time.monotonic()
    return _arrived[0] if _arrived else 0


def drop_signals() -> None:
    """Drop deferred signals that have arrived, and SIGTERM until `sigterm_raises` is left.

    Call this if the work stops for another reason, which is reported instead.
    """
    _arrived.clear()
    _raises.clear()
