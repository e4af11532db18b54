"""`sandmask doctor`: what the executors of sweeps need."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from sandmask.cli._finding import Finding, first_line, note, ok

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
