"""Plugins, which register user-defined algorithms and datasets: Python files, or entry points of packages.

A plugin is any module that registers something when it is imported:

    from sandmask.algorithms import ALGORITHMS, AlgorithmEntry
    ALGORITHMS.register(AlgorithmEntry(name="Mine", ...))

Name it with `--plugin FILE`, in the environment variable SANDMASK_PLUGINS (paths, separated as in PATH), or as an entry
point of the group `sandmask.plugins`.

An exception that a plugin raises later, in a step for example, is reported in one line with the plugin's file and line.
The environment variable SANDMASK_TRACEBACK=1 keeps the traceback.
"""

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

from sandmask._memory import is_out_of_memory
from sandmask._text import described
from sandmask.errors import SandmaskError

GROUP = "sandmask.plugins"
VARIABLE = "SANDMASK_PLUGINS"
TRACEBACK = "SANDMASK_TRACEBACK"

# Parts of torch's messages if a step breaks a rule for algorithms, and the rule.
_RULES = (
    (
        ("data-dependent control flow", "calling .item()"),
        "a step must not branch on a tensor's value or read it. Use torch.where instead of `if`, bool() or .item()",
    ),
    (
        ("randomness error mode",),
        "random numbers must come from `key`, by sandmask.functional.random, so that a run can be repeated",
    ),
    (
        ("inplace arithmetic",),
        "a step must not change tensors in place. Return new ones",
    ),
)
_PREFIX = "sandmask_plugin_"  # of the module names of plugin files
_sources: set[Path] = set()  # the files and package folders of loaded plugins

__all__ = [
    "GROUP",
    "TRACEBACK",
    "VARIABLE",
    "is_plugin_module",
    "load_plugins",
    "plugin_failure",
    "plugin_failures_named",
]


def load_plugins(paths: Iterable[str | Path] | None = None) -> None:
    """Import plugins: installed ones, those of SANDMASK_PLUGINS, then `paths`. Each is imported once.

    :param paths: further Python files.
    """
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
            _note_source(entry.module)
        except Exception as error:
            raise SandmaskError(
                f"The installed plugin {entry.name!r} ({entry.value}) cannot be loaded: {described(error)}. "
                "Fix or uninstall it."
            ) from error
    for path in (*named_files(), *(paths or ())):
        _load_file(Path(path).expanduser())


def named_files() -> list[str]:
    """The files that SANDMASK_PLUGINS names."""
    return [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def is_plugin_module(name: str) -> bool:
    """Return whether a module is a plugin that `load_plugins` finds in any process.

    :param name: name of the module.
    """
    packages = {entry.module.partition(".")[0] for entry in entry_points(group=GROUP)}
    return name.startswith(_PREFIX) or name.partition(".")[0] in packages


def _load_file(path: Path) -> None:
    resolved = path.resolve()
    if not resolved.is_file():
        raise SandmaskError(f"There is no plugin file {path}. Give --plugin the path of a Python file.")
    if resolved.suffix != ".py":
        raise SandmaskError(f"The plugin {path} should be a Python file, with a name that ends in .py.")
    # The name depends on the whole path: a file is loaded once, and two files of the same name are two modules.
    name = f"{_PREFIX}{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    _sources.add(resolved)
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, because dataclasses and pickle look up their module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that calls sys.exit() would end the command silently
        del sys.modules[name]
        where = f"{path}, line {_line(error, resolved)}"
        raise SandmaskError(f"The plugin {where} failed: {described(error)}") from error


def plugin_failure(error: BaseException) -> str | None:
    """Describe an exception that was raised inside a plugin in one line, with its file and line.

    :param error: the exception.
    :return: the line; None if the exception was raised elsewhere.
    """
    if os.environ.get(TRACEBACK) or isinstance(error, SandmaskError) or is_out_of_memory(error):
        return None
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if _sources & {file, *file.parents}]
    if not own:
        return None
    file, line = own[-1]
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    broken = [rule for signs, rule in _RULES if any(sign in str(error) for sign in signs)]
    reason = broken[0] if broken else described(error)
    return f"The plugin {shown}, line {line}, failed: {reason}. {TRACEBACK}=1 shows the traceback."


@contextmanager
def plugin_failures_named() -> Iterator[None]:
    """Turn exceptions of plugins in this context into a `SandmaskError` that names the plugin's file and line."""
    try:
        yield
    except Exception as error:
        if (failure := plugin_failure(error)) is None:
            raise
        raise SandmaskError(failure) from error


def _note_source(module_name: str) -> None:
    """Remember the file of an installed plugin, or the folder of a package."""
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if file is not None:
        _sources.add(Path(file).parent.resolve() if hasattr(module, "__path__") else Path(file).resolve())


def _line(error: BaseException, path: Path) -> int:
    """The line of a file that led to an error."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path) and frame.lineno]
    return lines[-1] if lines else 1
