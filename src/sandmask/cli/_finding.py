"""Findings of `sandmask doctor`: one line each, with advice."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """A line of the examination. A note is worth knowing, a problem keeps something from working."""

    name: str
    status: Status
    says: str
    advice: str | None = None


Check = Callable[[], Iterable[Finding]]


def ok(name: str, says: str) -> Finding:
    """All is well."""
    return Finding(name, "ok", says)


def note(name: str, says: str, advice: str | None = None) -> Finding:
    """Something that can be better, or is not there and need not be."""
    return Finding(name, "note", says, advice)


def problem(name: str, says: str, advice: str) -> Finding:
    """Something that does not work, and what to do."""
    return Finding(name, "problem", says, advice)


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def gibibytes(n_bytes: float) -> str:
    """A size, for people."""
    return f"{n_bytes / 2**30:,.1f} GiB"
