"""Export trained models for other programs: `torch.export` and ONNX.

An exported model maps preprocessed examples `[N, *input_shape]` (any N) to logits `[N, classes]`. The file also holds
the class names, the preprocessing and the run's spec, as JSON.
"""

import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sandmask._files import replacing
from sandmask._text import first_line
from sandmask.errors import SandmaskError
from sandmask.registry import check_known
from sandmask.training.trained_run import TrainedRun

METADATA = "sandmask"  # name of the metadata in an ONNX file, and with .json of the extra file in a .pt2
_TOLERANCE = 1e-3  # of the logits, relative to the largest logit; rounding errors of other kernels are far smaller
_ONNX_LIMIT = 2**31 - 2**20  # bytes that one ONNX file can hold
_KNOWN_WARNINGS = (  # about internals of the packages that export
    r"The given buffer is not writable",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ExportFormat:
    """A way to save a model: `write(module, example, metadata, path)`, and `read(path)` for the check."""

    suffix: str
    write: Callable[[nn.Module, Tensor, str, Path], None]
    read: Callable[[Path], Model]
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exported:
    """A file that was written, and the largest difference between its logits and the run's."""

    path: Path
    difference: float


def export_run(
    run: TrainedRun, format_name: str | None = None, output: str | os.PathLike[str] | None = None
) -> Exported:
    """Save the model of a run for other programs.

    The file is first written under a temporary name, read back, and compared with the run on batches of two sizes.

    :param run: the trained run, from `load_run`.
    :param format_name: "torch-export" or "onnx". If not given, the suffix of `output` decides, or it is "torch-export".
    :param output: file to write. If not given, `model.pt2` or `model.onnx` in the folder of the run, `ID.pt2` in the
        folder of a sweep, and with averaged weights `model-sma.pt2`.
    :return: the file, and the largest difference between its logits and the run's.
    """
    named = [name for name, known in FORMATS.items() if output is not None and Path(output).suffix == known.suffix]
    format_name = format_name or (named or ["torch-export"])[0]
    check_known("export format", format_name, FORMATS)
    chosen = FORMATS[format_name]
    if named and named != [format_name]:
        raise SandmaskError(
            f"{output} is named like the format {named[0]}, not {format_name}. Name it *{chosen.suffix}, or use "
            f"--format {named[0]}."
        )
    if missing := [package for package in chosen.packages if find_spec(package) is None]:
        raise SandmaskError(f"Export as {format_name} needs {', '.join(missing)}: pip install 'sandmask[export]'")
    path = run.path / f"{run.name}{chosen.suffix}" if output is None else Path(output)
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device"
        raise SandmaskError(f"{path} is {what}. Name the file to write, such as model{chosen.suffix}.")
    module = run.module().cpu().requires_grad_(False)
    with warnings.catch_warnings(), _explained(run, format_name, path):
        for message in _KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=True, suffix=chosen.suffix) as temporary:
            temporary.touch()  # raises OSError if the folder is not writable; PyTorch would raise another error
            example = torch.zeros(2, *run.input_shape)
            chosen.write(module, example, json.dumps(run.info.to_json()), temporary)
            difference = _compare(module, chosen.read(temporary), run)
    return Exported(path, difference)


@contextmanager
def _explained(run: TrainedRun, name: str, path: Path) -> Iterator[None]:
    """Convert errors of the exporter and of the file system to user errors."""
    try:
        yield
    except OSError as error:
        raise SandmaskError(f"{path} cannot be written: {error.strerror or error}.") from error
    except RuntimeError as error:
        raise SandmaskError(
            f"PyTorch cannot export {run.spec.network} ({run.spec.algorithm}) as {name}: {first_line(error)}"
        ) from error


@torch.no_grad()
def _compare(module: nn.Module, read: Model, run: TrainedRun) -> float:
    """The largest difference of logits on random inputs. Raise an error if it is larger than rounding errors."""
    generator = torch.Generator().manual_seed(0)
    differences = []
    for count in (1, 3):
        x = torch.randn(count, *run.input_shape, generator=generator)
        expected = module(x)
        differences.append(float((read(x) - expected).abs().max()))
        if not differences[-1] <= _TOLERANCE * (1.0 + float(expected.abs().max())):
            raise SandmaskError(
                f"The exported {run.spec.network} does not match the run: logits differ by "
                f"{differences[-1]:g}. Nothing was written; please report this."
            )
    return max(differences)


def _dynamic() -> tuple[dict[int, Any]]:
    return ({0: torch.export.Dim("batch")},)


def _write_torch(module: nn.Module, example: Tensor, metadata: str, path: Path) -> None:
    program = torch.export.export(module, (example,), dynamic_shapes=_dynamic(), strict=False)
    content = io.BytesIO()  # not a file, because PyTorch aborts the process if the disk is full
    torch.export.save(program, content, extra_files={f"{METADATA}.json": metadata})
    path.write_bytes(content.getbuffer())


def _write_onnx(module: nn.Module, example: Tensor, metadata: str, path: Path) -> None:
    n_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    if n_bytes > _ONNX_LIMIT:
        raise SandmaskError(
            f"The model has {n_bytes / 2**30:.1f} GiB of weights; an ONNX file holds at most 2. Use torch-export."
        )
    program = torch.onnx.export(
        module,
        (example,),
        dynamo=True,
        dynamic_shapes=_dynamic(),
        input_names=["x"],
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props[METADATA] = metadata
    program.save(path, external_data=False)


def _read_onnx(path: Path) -> Model:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


FORMATS = {
    "torch-export": ExportFormat(".pt2", _write_torch, lambda path: torch.export.load(path).module()),
    "onnx": ExportFormat(".onnx", _write_onnx, _read_onnx, ("onnx", "onnxscript", "onnxruntime")),
}
