"""`sandmask doctor`: installed packages, compared with the requirements in sandmask's own metadata."""

import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import sandmask
from sandmask.cli._finding import Finding, first_line, note, ok, problem

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
    """What is missing or too old of the packages of an extra, or of the required ones if it is empty."""
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
