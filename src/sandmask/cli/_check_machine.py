"""The doctor's look at the installation and the machine: versions, processors, GPUs, compilers, extras."""

import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import sandmask
from sandmask.cli._console import counted
from sandmask.cli._finding import Finding, first_line, gibibytes, note, ok, problem

if TYPE_CHECKING:
    import torch

_OLDEST_TORCH = (2, 7)
_PYTHONS = ((3, 11), (3, 13))
_FOR_DEVELOPERS = "dev"


def installation() -> Iterator[Finding]:
    """Versions, and whether a mask computes what it should."""
    yield ok("sandmask", f"{sandmask.__version__}, in {Path(sandmask.__file__).parent}")
    yield _python()
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation fails in many ways
        yield problem("torch", f"cannot be imported: {first_line(error)}", "pip install --force-reinstall torch")
        return
    yield _torch_version(torch.__version__)
    yield _masks()


def _python() -> Finding:
    oldest, newest = _PYTHONS
    if oldest <= sys.version_info[:2] <= newest:
        return ok("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    wanted = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    return problem("Python", f"{platform.python_version()}, tested are {wanted}", f"make an environment with {wanted}")


def _torch_version(version: str) -> Finding:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers >= _OLDEST_TORCH:
        return ok("torch", version)
    return problem("torch", f"{version} is too old", "pip install 'torch>=" + ".".join(map(str, _OLDEST_TORCH)) + "'")


def _masks() -> Finding:
    """Two environments agree on the first element and not on the second."""
    import torch

    try:
        update = sandmask.ANDMask(tau=1.0)(torch.tensor([[1.0, 1.0], [3.0, -1.0]])).tolist()
    except Exception as error:  # noqa: BLE001
        return problem("masks", f"fail: {first_line(error)}", "reinstall sandmask and torch")
    if update != [2.0, 0.0]:
        return problem("masks", f"compute {update} in place of [2, 0]", "reinstall sandmask and torch")
    return ok("masks", "compute what they should")


def devices(*, thorough: bool = False) -> Iterator[Finding]:
    """Processor, memory, GPUs with a computation on each, and what compiles for them."""
    import torch

    yield _threads(torch.get_num_threads())
    yield _memory()
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
        return note("CPU", f"{says}: they get in each other's way", f"export OMP_NUM_THREADS={cores}")
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

    if torch.version.cuda is None and torch.version.hip is None:
        if shutil.which("nvidia-smi"):
            advice = "install a torch build with CUDA: pytorch.org/get-started"
            return problem("GPU", "there is one, but this torch is built without CUDA", advice)
        return note("GPU", "none; this torch is built for the CPU. Small datasets train well without")
    if shutil.which("nvidia-smi"):
        advice = "compare the driver (nvidia-smi) with torch.version.cuda, and look at CUDA_VISIBLE_DEVICES"
        return problem("GPU", f"there is one, but torch (CUDA {torch.version.cuda}) does not see it", advice)
    return note("GPU", "none found. Small datasets train well without; image sets want one")


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
    """What torch.compile needs on a CPU; trying it takes long there, and --compile is for GPUs anyway."""
    names = (os.environ.get("CXX"), "g++", "clang++", "cl")
    found = next((name for name in names if name and shutil.which(name)), None)
    if found is None:
        return note("torch.compile", "finds no C++ compiler; only --compile needs one", "such as: apt install g++")
    return ok("torch.compile", f"finds {found}; to try it: sandmask doctor --thorough")


def _compile(device: "torch.device") -> Finding:
    """torch.compile, on a function of two operations."""
    import torch

    numbers = torch.linspace(-1, 1, 33, device=device)
    logging.disable(logging.WARNING)  # torch's remarks on the machine; what matters is whether it works
    try:
        computed = torch.compile(_small_function)(numbers)
    except Exception as error:  # noqa: BLE001
        advice = "only --compile needs it; it needs a C++ compiler, such as: apt install g++"
        return note("torch.compile", f"does not work: {first_line(error)}", advice)
    finally:
        logging.disable(logging.NOTSET)
    if not torch.allclose(computed, _small_function(numbers), atol=1e-5):
        return problem("torch.compile", "computes wrong numbers", "do not use --compile; update torch")
    return ok("torch.compile", f"works on {device.type}")


def _small_function(x: "torch.Tensor") -> "torch.Tensor":
    return (x * 2).tanh()


def extras() -> Iterator[Finding]:
    """The optional parts, as the package's own metadata lists them."""
    about = metadata.metadata("sandmask")
    for extra in about.get_all("Provides-Extra") or []:
        if extra == _FOR_DEVELOPERS:
            continue
        missing = [name for name in _packages_of(extra) if not _is_installed(name)]
        if missing:
            yield note(extra, f"not installed ({', '.join(missing)})", f"pip install 'sandmask[{extra}]'")
        else:
            yield ok(extra, ", ".join(f"{name} {metadata.version(name)}" for name in _packages_of(extra)))


def _packages_of(extra: str) -> list[str]:
    wanted = re.compile(rf"^([\w.-]+).*;.*extra == ['\"]{re.escape(extra)}['\"]")
    found = (wanted.match(line) for line in metadata.requires("sandmask") or [])
    return [match.group(1) for match in found if match]


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
