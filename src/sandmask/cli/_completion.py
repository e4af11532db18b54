"""What a shell may complete after an option or in place of an argument: the names of registered things.

Names are read off the source files, without running them: to import the registries takes torch's three seconds, and a
TAB should take none. Files named in SANDMASK_PLUGINS are read the same way.
"""

import ast
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# What registers a name: the record (or decorator) that is called, and where ours are.
_ALGORITHMS = ("algorithms", frozenset({"AlgorithmEntry"}))
_DATASETS = ("datasets", frozenset({"DatasetEntry", "ImageSet"}))
_RULES = ("selection", frozenset({"SelectionRule", "selection_rule"}))

Complete = Callable[[str], list[str]]


@cache
def registered(folder: str, records: frozenset[str]) -> tuple[str, ...]:
    """The names that the files of one of our packages register, and those of the user's plugins."""
    plugins = os.environ.get("SANDMASK_PLUGINS", "").split(os.pathsep)
    files = [*(_PACKAGE / folder).glob("*.py"), *(Path(name) for name in plugins if name)]
    return tuple(sorted({name for file in files for name in _names(file, records)}, key=str.lower))


def _names(file: Path, records: frozenset[str]) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text) if any(record in text for record in records) else ast.Module([], [])
    except (OSError, SyntaxError, UnicodeDecodeError):
        return  # running the command will say what is wrong with it
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in records:
            named = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
            for value in [*named, *node.args[:1]][:1]:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def _among(names: Callable[[], tuple[str, ...]]) -> Complete:
    """Completes one name, or the last one of several with commas between."""

    def complete(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        found = [name for name in names() if name.startswith(begun)]
        return [f"{before}{comma}{name}" for name in found]

    return complete


algorithm = _among(lambda: registered(*_ALGORITHMS))
dataset = _among(lambda: registered(*_DATASETS))
rule = _among(lambda: (*registered(*_RULES), "all"))


def words(*choices: str) -> Complete:
    """Completes one of a few words."""
    return _among(lambda: choices)
