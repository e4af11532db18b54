"""A user's own algorithms and datasets: a Python file named by path, or an installed package's entry point.

A plugin is any module that registers something when it is imported:

    from sandmask.algorithms import ALGORITHMS, AlgorithmEntry
    ALGORITHMS.register(AlgorithmEntry(name="Mine", ...))

It is found by `--plugin FILE`, by the environment variable SANDMASK_PLUGINS (paths, separated as in PATH), or
as an entry point of the group `sandmask.plugins`.
"""

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from sandmask.errors import SandmaskError

GROUP = "sandmask.plugins"
VARIABLE = "SANDMASK_PLUGINS"

__all__ = ["GROUP", "VARIABLE", "load_plugins"]


def load_plugins(paths: Iterable[str | Path] | None = None) -> None:
    """Import the plugins: installed ones, those of SANDMASK_PLUGINS, then `paths`. Each is imported once."""
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            raise SandmaskError(
                f"The installed plugin {entry.name!r} ({entry.value}) cannot be loaded: "
                f"{type(error).__name__}: {error}. Mend or uninstall it."
            ) from error
    named = [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    for path in (*named, *(paths or ())):
        _load_file(Path(path).expanduser())


def _load_file(path: Path) -> None:
    resolved = path.resolve()
    if not resolved.is_file():
        raise SandmaskError(f"There is no plugin file {path}. Give --plugin the path of a Python file.")
    if resolved.suffix != ".py":
        raise SandmaskError(f"The plugin {path} should be a Python file, with a name that ends in .py.")
    # The name is a function of the path: the same file is loaded once, two files of one name are two modules.
    name = f"sandmask_plugin_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        where = f"{path}, line {_line(error, resolved)}"
        raise SandmaskError(f"The plugin {where} failed: {type(error).__name__}: {_said(error)}") from error


def _line(error: Exception, path: Path) -> int:
    """The plugin's own line that led to the error."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path) and frame.lineno]
    return lines[-1] if lines else 1


def _said(error: Exception) -> str:
    """The error's message without the place, which is said already."""
    return error.msg if isinstance(error, SyntaxError) else str(error)
