"""Docstrings, for the reference page: examples are code, and stand before the list of parameters."""  # noqa: INP001

import re
from typing import Any

import griffe

# Lines that begin with >>> and what follows them, up to an empty line.
_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
# `:param name: text`, with the indented lines that continue it.
_FIELD = re.compile(r"^:\w+.*(?:\n[ \t]+\S.*)*\n?", re.MULTILINE)


class Fences(griffe.Extension):
    """Rewrites every docstring; the parser would take an example for part of the parameter before it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything within a package."""
        if obj.docstring is not None:
            obj.docstring.value = _rewritten(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called for the package itself."""
        self.on_object(obj=pkg)


def _rewritten(text: str) -> str:
    fields = "".join(f"{field.rstrip()}\n" for field in _FIELD.findall(text))
    words = _EXAMPLE.sub(lambda found: f"```pycon\n{found.group()}\n```", _FIELD.sub("", text))
    return f"{words.rstrip()}\n\n{fields}".rstrip()
