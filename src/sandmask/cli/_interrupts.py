"""Ctrl-C in the first seconds of a command."""

import os
import signal
from types import FrameType


def interrupts_end_imports() -> None:
    """Let an interrupt end the program at once while torch is imported; before that, and after, it is an exception.

    Torch tries to import numpy and swallows what happens there: the program would go on, with half of numpy. Nothing
    has begun by then that would have to be put away. A program told to ignore interrupts goes on ignoring them.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(_: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            os.write(2, b"\ninterrupted\n")
            os._exit(128 + signal.SIGINT)
        frame = frame.f_back
    raise KeyboardInterrupt
