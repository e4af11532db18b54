"""`sandmask doctor`: processor, memory, GPUs, compilers, and what the executors of sweeps need."""

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import sandmask
from sandmask.cli._console import counted
from sandmask.cli.doctor import Finding, first_line, gibibytes, note, ok, problem

if TYPE_CHECKING:
    import torch


def devices(*, thorough: bool = False) -> Iterator[Finding]:
    """Processor, memory, GPUs with a computation on each, and torch.compile."""
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


_SLURM = ("sbatch", "squeue", "scancel")
_PATIENCE = 10  # seconds for an answer of squeue


def executors() -> Iterator[Finding]:
    """Slurm, Ray, and NVIDIA's Multi-Process Service. Nothing else needs them, so that faults are notes."""
    yield _slurm()
    yield _ray()
    import torch

    if torch.cuda.is_available():
        yield _mps()


def _slurm() -> Finding:
    missing = [name for name in _SLURM if not shutil.which(name)]
    if len(missing) == len(_SLURM):
        return note("Slurm", "not on this machine; only --executor slurm needs it")
    if missing:
        return note("Slurm", f"{', '.join(missing)} not found", "add Slurm's commands to PATH")
    if find_spec("submitit") is None:
        return note("Slurm", "submitit is not installed; --executor slurm needs it", "pip install 'sandmask[slurm]'")
    try:
        command = ["squeue", "--noheader", "--me"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return note("Slurm", f"squeue does not answer: {first_line(error)}", "check the cluster: sinfo")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return note("Slurm", f"installed, but squeue fails: {said[-1]}", "check the cluster: sinfo")
    return ok("Slurm", "answers")


def _ray() -> Finding:
    if find_spec("ray") is None:
        return note("Ray", "not installed; only --executor ray needs it", "pip install 'sandmask[ray]'")
    address = os.environ.get("RAY_ADDRESS")
    return ok(
        "Ray", f"installed; RAY_ADDRESS is {address}" if address else "installed; sweeps start it here by default"
    )


def _mps() -> Finding:
    """MPS lets several processes compute on one GPU at the same time."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108 - NVIDIA's default
    if (pipes / "control").exists():
        return ok("NVIDIA MPS", "is running: several workers can share a GPU")
    advice = "nvidia-cuda-mps-control -d" if shutil.which("nvidia-cuda-mps-control") else None
    return note("NVIDIA MPS", "is not running: several workers on one GPU would take turns", advice)
