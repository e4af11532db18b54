"""`sandmask doctor`: packages, datasets, weights, disk space, plugins and shell completion."""

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import sandmask
from sandmask.cli.doctor import Finding, first_line, gibibytes, note, ok, problem
from sandmask.errors import SandmaskError

_PYTHONS = ((3, 11), (3, 13))
_FOR_DEVELOPERS = "dev"
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)[^;>]*(>=(?P<oldest>[\d.]+))?([^;]*;.*extra == ['\"](?P<extra>[\w-]+))?")


def installation() -> Iterator[Finding]:
    """Versions, and whether a mask computes what it should."""
    yield ok("sandmask", f"{sandmask.__version__}, in {Path(sandmask.__file__).parent}")
    yield _python()
    yield _dependencies()
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation fails in many ways
        yield problem("torch", f"cannot be imported: {first_line(error)}", "pip install --force-reinstall torch")
        return
    yield ok("torch", torch.__version__)
    yield _masks()


def _python() -> Finding:
    oldest, newest = _PYTHONS
    if oldest <= sys.version_info[:2] <= newest:
        return ok("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    wanted = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    found = platform.python_version()
    return problem("Python", f"{found} is not supported", f"create an environment with Python {wanted}")


def _dependencies() -> Finding:
    faults = _faults("")
    if faults:
        return problem("packages", "; ".join(faults), "pip install --upgrade sandmask")
    return ok("packages", "all required ones are installed")


def _masks() -> Finding:
    """Apply a mask to two environments that agree on the first element and not on the second."""
    import torch

    try:
        update = sandmask.ANDMask(tau=1.0)(torch.tensor([[1.0, 1.0], [3.0, -1.0]])).tolist()
    except Exception as error:  # noqa: BLE001
        return problem("masks", f"fail: {first_line(error)}", "reinstall sandmask and torch")
    if update != [2.0, 0.0]:
        return problem("masks", f"compute {update} instead of [2, 0]", "reinstall sandmask and torch")
    return ok("masks", "compute correct results")


def extras() -> Iterator[Finding]:
    """The optional parts, with the versions of their packages."""
    for extra in metadata.metadata("sandmask").get_all("Provides-Extra") or []:
        if extra == _FOR_DEVELOPERS:
            continue
        faults = _faults(extra)
        if faults:
            yield note(extra, "; ".join(faults), f"pip install --upgrade 'sandmask[{extra}]'")
        else:
            yield ok(extra, ", ".join(f"{name} {_version(name)}" for name in _required(extra)))


def _faults(extra: str) -> list[str]:
    """Packages of an extra that are missing or too old; of the required ones if the extra is empty."""
    faults = []
    for name, oldest in _required(extra).items():
        version = _version(name)
        if version is None:
            faults.append(f"{name} is not installed")
        elif _release(version) < _release(oldest):
            faults.append(f"{name} {version} is older than {oldest}")
    return faults


def _required(extra: str) -> dict[str, str]:
    """The packages of an extra, or the required ones if it is empty, with their oldest supported versions."""
    found = (_REQUIREMENT.match(line) for line in metadata.requires("sandmask") or [])
    return {match["name"]: match["oldest"] or "0" for match in found if match and (match["extra"] or "") == extra}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


_LITTLE_ROOM, _NO_ROOM = 10 * 2**30, 2**30
# Where `--install-completion` writes to, by shell.
_COMPLETIONS = {
    "bash": ".bash_completions/sandmask.sh",
    "zsh": ".zfunc/_sandmask",
    "fish": ".config/fish/completions/sandmask.fish",
}


def data(data_dir: Path | None) -> Iterator[Finding]:
    """List the datasets in the data folder, and how to get the others."""
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
    from sandmask.networks import NETWORKS

    for name in dict.fromkeys(entry.network for entry in DATASETS.values()):
        if name not in NETWORKS:
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
