"""Checks of `sandmask doctor`: packages, data, weights, disk space, plugins and completion. They report with `Say`."""

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Literal, Protocol

import sandmask
from sandmask._text import described
from sandmask.errors import SandmaskError

Status = Literal["ok", "note", "problem"]
GB = 2**30
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)[^;>]*(>=(?P<oldest>[\d.]+))?([^;]*;.*extra == ['\"](?P<extra>[\w-]+))?")
# Where `--install-completion` writes to, by shell.
_COMPLETIONS = {
    "bash": ".bash_completions/sandmask.sh",
    "zsh": ".zfunc/_sandmask",
    "fish": ".config/fish/completions/sandmask.fish",
}


class Say(Protocol):
    """Reports a line. With a note, everything works; a problem prevents something from working."""

    def __call__(self, name: str, status: Status, says: str, advice: str | None = None) -> None: ...


@contextmanager
def errors(say: Say, name: str, says: str, advice: str | None, status: Status = "problem") -> Iterator[None]:
    """If the block raises, report what failed, with the first line of the error."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a broken installation fails in many ways
        say(name, status, f"{says}: {described(error)}", advice)


def size(n_bytes: float) -> str:
    """Format a number of bytes."""
    return f"{n_bytes / GB:,.1f} GiB"


def installation(say: Say) -> None:
    """Versions, and a test of a mask."""
    say("sandmask", "ok", f"{sandmask.__version__}, in {Path(sandmask.__file__).parent}")
    python = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 14):
        say("Python", "ok", f"{python} on {platform.system()} {platform.machine()}")
    else:
        say("Python", "problem", f"{python} is not supported", "create an environment with Python 3.11 to 3.14")
    _, faults = _packages("")
    if not _is_installed():
        say("packages", "note", "not checked: sandmask runs from its source and is not installed", "pip install -e .")
    elif faults:
        say("packages", "problem", "; ".join(faults), "pip install --upgrade sandmask")
    else:
        say("packages", "ok", "all required ones are installed")
    with errors(say, "torch", "cannot be imported", "pip install --force-reinstall torch"):
        import torch

        say("torch", "ok", torch.__version__)
        # Two environments that agree on the first element and not on the second.
        gradients = torch.tensor([[1.0, 1.0], [3.0, -1.0]])
        advice = "reinstall sandmask and torch"
        with errors(say, "masks", "fail", advice):
            update = sandmask.ANDMask(tau=1.0)(gradients).tolist()
            if update == [2.0, 0.0]:
                say("masks", "ok", "compute correct results")
            else:
                say("masks", "problem", f"compute {update} instead of [2, 0]", advice)


def _packages(extra: str) -> tuple[list[str], list[str]]:
    """The installed packages of an extra with their versions, and problems. The extra "" has the required packages."""
    found, faults = [], []
    required = metadata.requires("sandmask") if _is_installed() else None
    for match in map(_REQUIREMENT.match, required or []):
        if match is None or (match["extra"] or "") != extra:
            continue
        name, oldest = match["name"], match["oldest"] or "0"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            faults.append(f"{name} is not installed")
            continue
        found.append(f"{name} {version}")
        if _release(version) < _release(oldest):
            faults.append(f"{name} {version} is older than {oldest}")
    return found, faults


def _is_installed() -> bool:
    """Whether pip knows sandmask. A source folder in PYTHONPATH has no list of requirements."""
    return any(metadata.distributions(name="sandmask"))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def extras(say: Say) -> None:
    """The optional parts, with the versions of their packages."""
    names = metadata.metadata("sandmask").get_all("Provides-Extra") if _is_installed() else None
    for extra in names or []:
        if extra == "dev":
            continue
        found, faults = _packages(extra)
        if faults:
            say(extra, "note", "; ".join(faults), f"pip install --upgrade 'sandmask[{extra}]'")
        else:
            say(extra, "ok", ", ".join(found))


def data(say: Say, data_dir: Path | None) -> None:
    """List the datasets in the data folder, and how to get the others."""
    from sandmask.datasets import data_folder
    from sandmask.datasets.sources import SOURCES, overview

    folder = data_folder(data_dir)
    if folder.is_dir():
        say("folder", "ok", str(folder))
    else:
        say("folder", "note", f"{folder} does not exist yet", "downloads create it; SANDMASK_DATA sets another folder")
    say("generated", "ok", ", ".join(row.name for row in overview(folder) if row.generated))
    for source in SOURCES.values():
        name = source.name if source.name in source.datasets else f"{source.name} sets"
        found = source.find(folder)
        if found is not None:
            say(name, "ok", f"{found}; to check it: sandmask data verify {source.name}")
        else:
            say(name, "note", "not found", f"sandmask data download {source.name}")


def weights(say: Say) -> None:
    """Pretrained weights of the networks that datasets use by default."""
    from sandmask.datasets import DATASETS
    from sandmask.networks import NETWORKS
    from sandmask.networks._timm import is_cached

    for name in dict.fromkeys(entry.network for entry in DATASETS.values() if entry.network not in NETWORKS):
        fetch = f"python -c \"import timm; timm.create_model('{name}', pretrained=True)\", or train --weights FILE"
        try:
            if is_cached(name):
                say(name, "ok", "in the cache")
            else:
                say(name, "note", "not in the cache; image datasets start from these weights", fetch)
        except SandmaskError as error:
            say(name, "note", str(error))


def disk(say: Say, runs: Path, data_dir: Path | None) -> None:
    """Whether runs can be written, and the free disk space."""
    from sandmask.datasets import data_folder

    nearest = _nearest(runs)
    advice = "change to another folder, or use --out"
    with errors(say, "runs", f"cannot write to {nearest.resolve()}", advice):
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".sandmask-doctor-"):
            pass
        say("runs", "ok", f"{runs.resolve()}{'' if nearest == runs else ', created by the first run'}")
    for name, folder in (("room for runs", nearest), ("room for data", _nearest(data_folder(data_dir)))):
        with errors(say, name, "unknown", None, "note"):
            free = shutil.disk_usage(folder).free
            if free < GB:
                say(name, "problem", f"{size(free)} free", "free some space for records, checkpoints and models")
            elif free < 10 * GB:
                say(name, "note", f"{size(free)} free", "enough for records, but not for image datasets")
            else:
                say(name, "ok", f"{size(free)} free")


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest parent that exists."""
    return next((each for each in (folder, *folder.absolute().parents) if each.exists()), Path())


def terminal(say: Say) -> None:
    """Whether the plugins that every command loads can be imported, and whether the shell completes our commands."""
    from sandmask.plugins import GROUP, VARIABLE, load_plugins, named_files

    found = [*(entry.name for entry in metadata.entry_points(group=GROUP)), *named_files()]
    try:
        load_plugins()
        say("plugins", "ok", ", ".join(found) or "none")
    except SandmaskError as error:
        say("plugins", "problem", str(error), f"fix it, or remove it from {VARIABLE}")
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in _COMPLETIONS:
        say("completion", "note", f"not available for the shell {shell!r}" if shell else "the shell is unknown")
    elif (Path.home() / _COMPLETIONS[shell]).is_file():
        say("completion", "ok", f"installed for {shell}")
    else:
        say("completion", "note", f"not installed for {shell}", "sandmask --install-completion")
