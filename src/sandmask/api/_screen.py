"""Where progress can be shown: in a terminal, in a notebook, as lines of a log, or nowhere."""

import html
import sys
from importlib import import_module
from typing import Any, Literal

from rich.console import Console

from sandmask._text import tell
from sandmask.errors import SandmaskError

# True shows progress in a terminal or a notebook; "lines" also writes a line now and then where there is neither.
ShowProgress = bool | Literal["lines"]
Screen = Literal["terminal", "notebook", "lines", "none"]


def choose_screen(progress: ShowProgress) -> Screen:
    """Where the progress of this program is shown."""
    if progress not in (True, False, "lines"):
        raise SandmaskError(f"progress should be True, False or 'lines'. Found {progress!r}.")
    if not progress:
        return "none"
    if Console().is_jupyter:
        return "notebook"
    if sys.stderr.isatty():
        return "terminal"
    return "lines" if progress == "lines" else "none"


def say_on(screen: Screen, text: str) -> None:
    """Print a line. Notebooks mark what is on standard error as if it were an error, so there it is standard output."""
    if screen == "notebook":
        sys.stdout.write(f"{text}\n")
    elif screen != "none":
        tell(text)


class NotebookText:
    """A piece of text in the output of a notebook's cell that `show` replaces. It needs no widgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Show `text` in place of what was shown before."""
        data = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._handle is None:
            display: Any = import_module("IPython.display")
            self._handle = display.display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
