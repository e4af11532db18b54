"""Checks of `sandmask doctor`: the processor, GPUs, torch.compile, and executors of sweeps."""

import logging
import os
import shutil
import subprocess
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import sandmask
from sandmask._memory import free_memory, usable_cores
from sandmask._text import counted
from sandmask.cli._checks import GB, Say, errors, size

if TYPE_CHECKING:
    import torch

_SLURM = ("sbatch", "squeue", "scancel")


def devices(say: Say, *, thorough: bool = False) -> None:
    """Check processor, memory, each GPU with a computation, and torch.compile."""
    import torch
    import torch.distributed as dist

    _processor(say, torch.get_num_threads(), free_memory())
    if dist.is_available() and dist.is_gloo_available():
        nccl = " or nccl" if dist.is_nccl_available() else ""
        say("torchrun", "ok", f"can train one model in several processes, with gloo{nccl}")
    else:
        say("torchrun", "note", "this torch is built without it, so a model trains in one process")
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            _gpu(say, torch.device("cuda", number))
        _kernels(say)
        _compile(say, torch.device("cuda"))
    else:
        _no_gpu(say)
        if thorough:
            _compile(say, torch.device("cpu"))
        else:
            _compiler(say)


def _processor(say: Say, used: int, free: int | None) -> None:
    cores = usable_cores()
    says = f"{counted(used, 'thread')} on {counted(cores, 'core')}"
    variable = os.environ.get("OMP_NUM_THREADS")
    if used > cores:
        say("CPU", "note", f"{says}: too many", f"export OMP_NUM_THREADS={cores}")
    elif used < cores and variable:
        say("CPU", "note", f"{says}, because OMP_NUM_THREADS={variable}", "unset OMP_NUM_THREADS to use them all")
    else:
        say("CPU", "ok", says)
    if free is None:
        say("memory", "ok", "the system does not say how much is free")
    elif free < 2 * GB:
        say("memory", "note", f"{size(free)} free", "close other programs; image sets need several GiB")
    else:
        say("memory", "ok", f"{size(free)} free")


def _gpu(say: Say, device: "torch.device") -> None:
    """Compare a matrix product on the GPU with the CPU's, because a GPU that is listed may not compute."""
    import torch

    name = f"GPU {device.index}"
    advice = "install the torch build for this GPU and driver (pytorch.org), or use --device cpu"
    with errors(say, name, "does not compute", advice):
        free, total = torch.cuda.mem_get_info(device)
        says = f"{torch.cuda.get_device_name(device)}, {size(free)} of {size(total)} free"
        square = torch.arange(64.0).view(8, 8)
        computed = (square.to(device) @ square.to(device)).cpu()
        if not torch.allclose(computed, square @ square, rtol=1e-2):  # TF32 may be on
            say(name, "problem", f"{says}; it computes wrong numbers", "check the driver and the hardware")
        elif free < total / 10:
            say(name, "note", says, "another program holds most of it (nvidia-smi says which)")
        else:
            say(name, "ok", f"{says}; computes")


def _no_gpu(say: Say) -> None:
    import torch

    built_for_gpu = torch.version.cuda is not None or torch.version.hip is not None
    if torch.backends.mps.is_available():
        _apple_gpu(say, torch.device("mps"))
    elif shutil.which("nvidia-smi") and built_for_gpu:
        advice = "compare the driver (nvidia-smi) with torch.version.cuda, and look at CUDA_VISIBLE_DEVICES"
        say("GPU", "problem", f"this machine has one, but torch (CUDA {torch.version.cuda}) does not find it", advice)
    elif shutil.which("nvidia-smi"):
        advice = "install a torch build with CUDA: pytorch.org/get-started"
        say("GPU", "problem", "this machine has one, but this torch is built without CUDA", advice)
    elif built_for_gpu:
        say("GPU", "note", "none found; the CPU suffices for small datasets, but not for large image datasets")
    else:
        say("GPU", "note", "none; this torch is built for the CPU, which suffices for small datasets")


def _apple_gpu(say: Say, device: "torch.device") -> None:
    """Compare random numbers on an Apple GPU, which need exact products of 64-bit integers, with the CPU's."""
    import torch

    from sandmask.functional import random

    key = random.key_of(0)
    with errors(say, "GPU", "does not compute", "train on the CPU, which is the default"):
        if torch.equal(random.uniform(key.to(device), 1000).cpu(), random.uniform(key, 1000)):
            says = "Apple's GPU computes; sandmask has only been tested on an emulation of it"
            say("GPU", "note", says, "it is used with --device mps; compare a short run with --device cpu")
        else:
            say("GPU", "problem", "Apple's GPU computes wrong numbers", "train on the CPU, which is the default")


def _kernels(say: Say) -> None:
    """Compare the one-pass mask kernels on the GPU with the CPU's results."""
    import torch

    from sandmask.masks._gpu import kernels

    stack = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    mask = sandmask.SANDMask(tau=0.5)
    with errors(say, "Triton", "fails", "pip install --force-reinstall triton; a C compiler"):
        if kernels([stack.cuda()]) is None:
            say("Triton", "note", "not installed: masks on the GPU take several passes", "pip install triton")
        elif torch.allclose(mask(stack.cuda()).cpu(), mask(stack), atol=1e-5):
            say("Triton", "ok", "the mask kernels agree with the CPU")
        else:
            say("Triton", "problem", "the mask kernels compute wrong numbers", "pip install --force-reinstall triton")


def _compiler(say: Say) -> None:
    """Check for a C++ compiler, which torch.compile needs; compiling on a CPU takes long and is rarely used."""
    names = (os.environ.get("CXX"), "g++", "clang++", "cl")
    found = next((name for name in names if name and shutil.which(name)), None)
    if found is None:
        say("torch.compile", "note", "finds no C++ compiler; only --compile needs one", "such as: apt install g++")
    else:
        say("torch.compile", "ok", f"finds {found}; to try it: sandmask doctor --thorough")


def _compile(say: Say, device: "torch.device") -> None:
    """Test torch.compile on a function of two operations."""
    import torch

    def small(x: "torch.Tensor") -> "torch.Tensor":
        return (x * 2).tanh()

    numbers = torch.linspace(-1, 1, 33, device=device)
    advice = "only --compile needs it; it needs a C++ compiler, such as: apt install g++"
    logging.disable(logging.WARNING)  # hides torch's warnings about the machine
    try:
        with warnings.catch_warnings(action="ignore"), errors(say, "torch.compile", "does not work", advice, "note"):
            if torch.allclose(torch.compile(small)(numbers), small(numbers), atol=1e-5):
                say("torch.compile", "ok", f"works on {device.type}")
            else:
                say("torch.compile", "problem", "computes wrong numbers", "do not use --compile; update torch")
    finally:
        logging.disable(logging.NOTSET)


def executors(say: Say) -> None:
    """Check Slurm, Ray, and NVIDIA's MPS, with which processes share a GPU. They are optional, so faults are notes."""
    import torch

    _slurm(say)
    address = os.environ.get("RAY_ADDRESS")
    if find_spec("ray") is None:
        say("Ray", "note", "not installed; only --executor ray needs it", "pip install 'sandmask[ray]'")
    elif address:
        say("Ray", "ok", f"installed; RAY_ADDRESS is {address}")
    else:
        say("Ray", "ok", "installed; sweeps start it here by default")
    if torch.cuda.is_available():
        pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108 - NVIDIA's default
        if (pipes / "control").exists():
            say("NVIDIA MPS", "ok", "is running: several workers can share a GPU")
        else:
            advice = "nvidia-cuda-mps-control -d" if shutil.which("nvidia-cuda-mps-control") else None
            say("NVIDIA MPS", "note", "is not running: several workers on one GPU would take turns", advice)


def _slurm(say: Say) -> None:
    missing = [name for name in _SLURM if not shutil.which(name)]
    if len(missing) == len(_SLURM):
        say("Slurm", "note", "not on this machine; only --executor slurm needs it")
    elif missing:
        say("Slurm", "note", f"{', '.join(missing)} not found", "add Slurm's commands to PATH")
    elif find_spec("submitit") is None:
        say("Slurm", "note", "submitit is not installed; --executor slurm needs it", "pip install 'sandmask[slurm]'")
    else:
        advice = "check the cluster: sinfo"
        with errors(say, "Slurm", "squeue does not answer", advice, "note"):
            command = ["squeue", "--noheader", "--me"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
            if done.returncode:
                said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
                say("Slurm", "note", f"installed, but squeue fails: {said[-1]}", advice)
            else:
                say("Slurm", "ok", "answers")
