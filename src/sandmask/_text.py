"""Print names of files, folders and classes safely, and print lines to standard error."""

import os
import shlex
import sys
import unicodedata
from pathlib import Path

_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and format characters, lone surrogates, line separators


def printable(text: str) -> str:
    r"""Escape characters that would move a terminal's cursor, change its colour or reverse its direction.

    >>> printable("cat\x1b[31m\n")
    'cat\\x1b[31m\\n'
    """
    if text.isprintable():
        return text
    return "".join(_escaped(letter) if unicodedata.category(letter) in _UNSAFE else letter for letter in text)


def printable_lines(text: str) -> str:
    """`printable` for a text of several lines. Line breaks are kept."""
    return "\n".join(map(printable, text.split("\n")))


def _escaped(letter: str) -> str:
    if 0xDC80 <= ord(letter) <= 0xDCFF:  # how Python represents a byte that is not valid UTF-8
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")


def counted(number: int, noun: str) -> str:
    """Count things in words.

    >>> counted(1, "run"), counted(1200, "run"), counted(2, "class")
    ('1 run', '1,200 runs', '2 classes')
    """
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def duration(seconds: float | None) -> str:
    """Format a duration.

    >>> duration(45), duration(700), duration(12000)
    ('45 s', '12 min', '3 h 20 min')
    """
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def in_shell(path: str | os.PathLike[str]) -> str:
    """Quote a path for a shell, for commands to copy."""
    return printable(shlex.quote(os.fspath(path)))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def described(error: BaseException) -> str:
    """The type of an error and the first line of its message, without the place of a syntax error."""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    return ": ".join([type(error).__name__, *said.strip().splitlines()[:1]])


def tell(text: str) -> None:
    """Print a line on standard error. If it cannot be written, this line and all later ones are dropped.

    A long training should not fail because the program that shows its output ended or the disk of its log is full.
    """
    try:
        if sys.stderr is not None:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
    except OSError:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - as long as the program
