"""Compute precision, deterministic kernels and other settings of the process, while runs train."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, get_args

import torch

from sandmask._text import first_line
from sandmask.errors import SandmaskError
from sandmask.functional.split import split_products, use_split_products
from sandmask.registry import check_known
from sandmask.training.malloc import freed_memory_kept

Precision = Literal["fp32", "fp32x3", "tf32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
SWEEPS_ON_GPU: Precision = "fp32x3"  # the default of new sweeps on a GPU


def choose_device(wanted: str | torch.device | None, *, here: bool = True) -> torch.device:
    """Return the wanted device. None chooses a GPU if there is one, otherwise the CPU.

    :param wanted: "cpu", "cuda", "cuda:1", or None.
    :param here: raise an error if the device does not work on this machine.
    """
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        if here:
            torch.zeros((), device=device).item()  # fails on devices whose tensors have no values, such as meta
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).partition(". ")[0].rstrip(".")  # the message of PyTorch has several sentences
        raise SandmaskError(f"Device {str(wanted)!r} cannot be used here: {reason}. Try --device cpu.") from error
    return device


def sweep_precision(device: str | None) -> Precision:
    """The default precision of a new sweep.

    :param device: the requested devices, if any.
    """
    on_gpu = torch.cuda.is_available() if device is None else device.strip().startswith("cuda")
    return SWEEPS_ON_GPU if on_gpu else "fp32"


def set_precision(precision: str) -> None:
    """Set the precision of products, and select deterministic kernels, for the whole process.

    :param precision: "fp32", "fp32x3", "tf32", "bf16" or "fp16".
    """
    check_known("precision", precision, PRECISIONS)
    fast = precision not in ("fp32", "fp32x3")
    use_split_products(precision == "fp32x3")
    torch.set_float32_matmul_precision("high" if fast else "highest")
    torch.backends.cudnn.allow_tf32 = fast
    # Partial sums of half-precision products are added in float32.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


@contextmanager
def temporary_precision(precision: str) -> Iterator[None]:
    """`set_precision` within a `with` block. Afterwards, the previous settings are restored."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    splits = split_products()
    reductions = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    set_precision(precision)
    try:
        yield
    finally:
        use_split_products(splits)
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before[1:]
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = reductions


@contextmanager
def stack_settings(precision: str, device: torch.device) -> Iterator[None]:
    """The settings of the process while a stack trains: the precision, and on a CPU also `freed_memory_kept`."""
    with temporary_precision(precision), freed_memory_kept() if device.type == "cpu" else nullcontext():
        yield


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype of activations."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
