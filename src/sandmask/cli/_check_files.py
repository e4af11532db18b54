"""`sandmask doctor`: datasets, weights, disk space, plugins and shell completion."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sandmask.cli._finding import Finding, first_line, gibibytes, note, ok, problem
from sandmask.errors import SandmaskError

_FROM_SCRATCH = ("mlp", "mnist-convnet")
_LITTLE_ROOM, _NO_ROOM = 10 * 2**30, 2**30
# Where `--install-completion` writes to, by shell.
_COMPLETIONS = {
    "bash": ".bash_completions/sandmask.sh",
    "zsh": ".zfunc/_sandmask",
    "fish": ".config/fish/completions/sandmask.fish",
}


def data(data_dir: Path | None) -> Iterator[Finding]:
    """Which datasets are in the data folder, and how to get the others."""
    from sandmask.datasets import data_folder
    from sandmask.datasets.sources import SOURCES, overview

    folder = data_folder(data_dir)
    if folder.is_dir():
        yield ok("folder", str(folder))
    else:
        yield note("folder", f"{folder} does not exist yet", "downloads create it; SANDMASK_DATA sets another folder")
    yield ok("generated", ", ".join(row.name for row in overview(folder) if row.generated))
    for source in SOURCES.values():
        name = source.name if source.name in source.datasets else f"{source.name} sets"
        found = source.find(folder)
        if found is not None:
            yield ok(name, f"{found}; to check it: sandmask data verify {source.name}")
        else:
            yield note(name, "not found", f"sandmask data download {source.name}")


def weights() -> Iterator[Finding]:
    """Pretrained weights of the networks that datasets use by default."""
    from sandmask.datasets import DATASETS

    for name in dict.fromkeys(entry.network for entry in DATASETS.values()):
        if name not in _FROM_SCRATCH:
            yield _weights_of(name)


def _weights_of(name: str) -> Finding:
    from sandmask.networks._pretrained import _is_cached
    from sandmask.networks._timm import pretrained_cfg

    try:
        cached = _is_cached(pretrained_cfg(name))
    except SandmaskError as error:
        return note(name, str(error))
    if cached:
        return ok(name, "in the cache")
    fetch = f"python -c \"import timm; timm.create_model('{name}', pretrained=True)\""
    return note(name, "not in the cache; image datasets start from these weights", f"{fetch}, or train --weights FILE")


def terminal() -> Iterator[Finding]:
    """Plugins that every command loads, and shell completion."""
    yield from plugins()
    yield from completion()


def plugins() -> Iterator[Finding]:
    """Whether the plugins that every command loads can be imported."""
    from importlib.metadata import entry_points

    from sandmask.plugins import GROUP, VARIABLE, load_plugins

    named = [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    found = [*(entry.name for entry in entry_points(group=GROUP)), *named]
    try:
        load_plugins()
    except SandmaskError as error:
        yield problem("plugins", str(error), f"fix it, or remove it from {VARIABLE}")
    else:
        yield ok("plugins", ", ".join(found) if found else "none")


def disk(runs: Path, data_dir: Path | None) -> Iterator[Finding]:
    """Whether runs can be written, and how much room there is."""
    from sandmask.datasets import data_folder

    yield _writable(runs)
    for name, folder in (("room for runs", runs), ("room for data", data_folder(data_dir))):
        yield _room(name, _nearest(folder))


def _writable(folder: Path) -> Finding:
    nearest = _nearest(folder)
    says = str(folder.resolve()) if nearest == folder else f"{folder.resolve()}, created by the first run"
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".sandmask-doctor-"):
            return ok("runs", says)
    except OSError as error:
        return problem(
            "runs",
            f"cannot write to {nearest.resolve()}: {first_line(error)}",
            "change to another folder, or use --out",
        )


def _room(name: str, folder: Path) -> Finding:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return note(name, f"unknown: {first_line(error)}")
    says = f"{gibibytes(free)} free"
    if free < _NO_ROOM:
        return problem(name, says, "free some space for records, checkpoints and models")
    return note(name, says, "enough for records, but not for image datasets") if free < _LITTLE_ROOM else ok(name, says)


def _nearest(folder: Path) -> Path:
    """The folder, or the first one above it that is there; a file in its place, if there is one."""
    return next((each for each in (folder, *folder.absolute().parents) if each.exists()), Path())


def completion() -> Iterator[Finding]:
    """Whether the user's shell completes our commands."""
    shell = Path(os.environ.get("SHELL", "")).name
    file = _COMPLETIONS.get(shell)
    if file is None:
        yield note("completion", f"not available for the shell {shell!r}" if shell else "the shell is unknown")
    elif (Path.home() / file).is_file():
        yield ok("completion", f"installed for {shell}")
    else:
        yield note("completion", f"not installed for {shell}", "sandmask --install-completion")
