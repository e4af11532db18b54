"""The checks of `sandmask doctor`: packages, devices, executors, data, weights, disk space, plugins and completion."""

import logging
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import sandmask
from sandmask._text import counted
from sandmask.cli.doctor import Finding, first_line, gibibytes, note, ok, problem
from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    import torch


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
    found = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return ok("Python", f"{found} on {platform.system()} {platform.machine()}")
    return problem("Python", f"{found} is not supported", "create an environment with Python 3.11 to 3.13")


def _dependencies() -> Finding:
    if faults := _faults(""):
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
        if extra == "dev":
            continue
        if faults := _faults(extra):
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
    from sandmask.networks._timm import is_cached

    for name in dict.fromkeys(entry.network for entry in DATASETS.values() if entry.network not in NETWORKS):
        fetch = f"python -c \"import timm; timm.create_model('{name}', pretrained=True)\", or train --weights FILE"
        try:
            cached = is_cached(name)
        except SandmaskError as error:
            yield note(name, str(error))
        else:
            missing = note(name, "not in the cache; image datasets start from these weights", fetch)
            yield ok(name, "in the cache") if cached else missing


def plugins() -> Iterator[Finding]:
    """Whether the plugins that every command loads can be imported."""
    from sandmask.plugins import GROUP, VARIABLE, load_plugins

    named = [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    found = [*(entry.name for entry in metadata.entry_points(group=GROUP)), *named]
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
        says = f"cannot write to {nearest.resolve()}: {first_line(error)}"
        return problem("runs", says, "change to another folder, or use --out")


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


def devices(*, thorough: bool = False) -> Iterator[Finding]:
    """Processor, memory, GPUs with a computation on each, and torch.compile."""
    import torch

    yield _threads(torch.get_num_threads())
    yield _memory()
    yield _processes()
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            yield _gpu(torch.device("cuda", number))
        yield _kernels()
        yield _compile(torch.device("cuda"))
    else:
        yield _no_gpu()
        yield _compile(torch.device("cpu")) if thorough else _compiler()


def _threads(used: int) -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    says = f"{counted(used, 'thread')} on {counted(cores, 'core')}"
    variable = os.environ.get("OMP_NUM_THREADS")
    if used > cores:
        return note("CPU", f"{says}: too many", f"export OMP_NUM_THREADS={cores}")
    if used < cores and variable:
        return note("CPU", f"{says}, because OMP_NUM_THREADS={variable}", "unset OMP_NUM_THREADS to use them all")
    return ok("CPU", says)


def _memory() -> Finding:
    from sandmask._memory import free_memory

    free = free_memory()
    if free is None:
        return ok("memory", "the system does not say how much is free")
    if free < 2 * 2**30:
        return note("memory", f"{gibibytes(free)} free", "close other programs; image sets need several GiB")
    return ok("memory", f"{gibibytes(free)} free")


def _processes() -> Finding:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return note("torchrun", "this torch is built without it: a model trains in one process")
    return ok("torchrun", f"one model in several processes, by gloo{' or nccl' * dist.is_nccl_available()}")


def _gpu(device: "torch.device") -> Finding:
    """A product on the GPU, compared with the CPU's; being listed does not mean that it computes."""
    import torch

    name = f"GPU {device.index}"
    try:
        free, total = torch.cuda.mem_get_info(device)
        says = f"{torch.cuda.get_device_name(device)}, {gibibytes(free)} of {gibibytes(total)} free"
        square = torch.arange(64.0).view(8, 8)
        computed = (square.to(device) @ square.to(device)).cpu()
    except Exception as error:  # noqa: BLE001
        advice = "install the torch build for this GPU and driver (pytorch.org), or use --device cpu"
        return problem(name, f"does not compute: {first_line(error)}", advice)
    if not torch.allclose(computed, square @ square, rtol=1e-2):  # TF32 may be on
        return problem(name, f"{says}; it computes wrong numbers", "check the driver and the hardware")
    if free < total / 10:
        return note(name, says, "another program holds most of it (nvidia-smi says which)")
    return ok(name, f"{says}; computes")


def _no_gpu() -> Finding:
    import torch

    if torch.backends.mps.is_available():
        return note("GPU", "Apple's GPU (MPS) is not used by default and not tested", "try it with --device mps")
    if torch.version.cuda is None and torch.version.hip is None:
        if shutil.which("nvidia-smi"):
            advice = "install a torch build with CUDA: pytorch.org/get-started"
            return problem("GPU", "this machine has one, but this torch is built without CUDA", advice)
        return note("GPU", "none; this torch is built for the CPU, which suffices for small datasets")
    if shutil.which("nvidia-smi"):
        advice = "compare the driver (nvidia-smi) with torch.version.cuda, and look at CUDA_VISIBLE_DEVICES"
        return problem("GPU", f"this machine has one, but torch (CUDA {torch.version.cuda}) does not find it", advice)
    return note("GPU", "none found; the CPU suffices for small datasets, but not for large image datasets")


def _kernels() -> Finding:
    """The one-pass mask kernels on the GPU, against the CPU's twin."""
    import torch

    from sandmask.masks._gpu import kernels

    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 4096, generator=generator)
    mask = sandmask.SANDMask(tau=0.5)
    try:
        found = kernels([stack.cuda()])
        computed = mask(stack.cuda()).cpu()
    except Exception as error:  # noqa: BLE001
        return problem("Triton", f"fails: {first_line(error)}", "pip install --force-reinstall triton; a C compiler")
    if found is None:
        return note("Triton", "not installed: masks on the GPU take several passes", "pip install triton")
    if not torch.allclose(computed, mask(stack), atol=1e-5):
        return problem("Triton", "the mask kernels compute wrong numbers", "pip install --force-reinstall triton")
    return ok("Triton", "the mask kernels agree with the CPU")


def _compiler() -> Finding:
    """Check for a C++ compiler, which torch.compile needs; compiling on a CPU takes long and is rarely used."""
    names = (os.environ.get("CXX"), "g++", "clang++", "cl")
    found = next((name for name in names if name and shutil.which(name)), None)
    if found is None:
        return note("torch.compile", "finds no C++ compiler; only --compile needs one", "such as: apt install g++")
    return ok("torch.compile", f"finds {found}; to try it: sandmask doctor --thorough")


def _compile(device: "torch.device") -> Finding:
    """torch.compile, on a function of two operations."""
    import torch

    def small(x: "torch.Tensor") -> "torch.Tensor":
        return (x * 2).tanh()

    numbers = torch.linspace(-1, 1, 33, device=device)
    logging.disable(logging.WARNING)  # torch's remarks on the machine; what matters is whether it works
    try:
        computed = torch.compile(small)(numbers)
    except Exception as error:  # noqa: BLE001
        advice = "only --compile needs it; it needs a C++ compiler, such as: apt install g++"
        return note("torch.compile", f"does not work: {first_line(error)}", advice)
    finally:
        logging.disable(logging.NOTSET)
    if not torch.allclose(computed, small(numbers), atol=1e-5):
        return problem("torch.compile", "computes wrong numbers", "do not use --compile; update torch")
    return ok("torch.compile", f"works on {device.type}")
