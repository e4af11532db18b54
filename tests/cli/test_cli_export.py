"""`sandmask export`: files that compute what the run computes, read by the programs that they are for."""

import json
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from sandmask.cli._app import app
from sandmask.datasets import DATASETS, load_dataset
from sandmask.errors import SandmaskError
from sandmask.training import RunFolder, TrainedRun, export_run, exporting, load_run, make_spec
from sandmask.training.model_file import ModelInfo

CPU = torch.device("cpu")


def export(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def read_torch(path: Path) -> tuple[Callable[[Tensor], Tensor], str]:
    extra = {"sandmask.json": ""}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        program = torch.export.load(path, extra_files=extra)
    return program.module(), extra["sandmask.json"]


def read_onnx(path: Path) -> tuple[Callable[[Tensor], Tensor], str]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map["sandmask"]
    assert [each.name for each in (*session.get_inputs(), *session.get_outputs())] == ["x", "logits"]
    return lambda x: torch.from_numpy(session.run(["logits"], {"x": x.numpy()})[0]), metadata


READERS = {"torch-export": read_torch, "onnx": read_onnx}


def train(folder: Path, name: str, algorithm: str, **hparams: Any) -> Path:
    spec = make_spec(DATASETS[name], algorithm, [0], steps=1, hparams=hparams)
    RunFolder(folder).train(spec, load_dataset(name), CPU)
    return folder


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"), "DebugVector", "ERM", batch_size=8, mlp_width=16)


def assert_same(path: Path, format_name: str, run: TrainedRun) -> None:
    """The file gives the run's logits for batches of any size, and says what they mean."""
    model, metadata = READERS[format_name](path)
    draws = torch.Generator().manual_seed(1)
    for count in (1, 2, 5):
        x = torch.randn(count, *run.input_shape, generator=draws)
        with torch.no_grad():
            torch.testing.assert_close(model(x), run.logits(x), rtol=1e-4, atol=1e-4)
    assert ModelInfo.from_json(json.loads(metadata)) == run.info
    assert tuple(json.loads(metadata)["classes"]) == run.classes


@pytest.mark.parametrize(
    ("algorithm", "dataset"), [("SANDMask", "Debug28"), ("ARM", "Debug28"), ("MTL", "DebugVector")]
)
def test_models_compute_the_same_elsewhere(algorithm: str, dataset: str, tmp_path: Path) -> None:
    run = load_run(train(tmp_path, dataset, algorithm, batch_size=2))
    for format_name in READERS:
        exported = export_run(run, format_name)
        assert exported.path.parent == tmp_path
        assert exported.difference < 1e-4
        assert_same(exported.path, format_name, run)


def test_a_backbone_with_its_batch_norm_statistics(tmp_path: Path) -> None:
    model = timm.create_model("test_efficientnet")
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.uniform_(-0.5, 0.5)
            part.running_var.uniform_(0.2, 2.0)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    weights = str(tmp_path / "weights.safetensors")
    spec = make_spec(
        DATASETS["Debug28"], "ERM", [0], steps=1, hparams={"batch_size": 2}, network="test_efficientnet",
        weights=weights,
    )  # fmt: skip
    RunFolder(tmp_path / "run").train(spec, load_dataset("Debug28"), CPU, weights=weights)
    run = load_run(tmp_path / "run")
    for format_name in READERS:
        assert_same(export_run(run, format_name).path, format_name, run)


def test_the_command_says_what_it_wrote(vectors: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "classifier.onnx"
    result = export(vectors, "--format", "onnx", "--output", target)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Wrote {target}: [N, 8] -> logits [N, 2]. Checked against the run:")
    assert [path.name for path in target.parent.iterdir()] == ["classifier.onnx"]
    assert_same(target, "onnx", load_run(vectors))


def test_a_files_name_decides_its_format_and_may_not_contradict_it(vectors: Path, tmp_path: Path) -> None:
    for name, format_name in (("a.onnx", "onnx"), ("a.pt2", "torch-export"), ("a.bin", "torch-export")):
        assert export(vectors, "--output", tmp_path / name).exit_code == 0
        assert_same(tmp_path / name, format_name, load_run(vectors))
    result = export(vectors, "--format", "torch-export", "--output", tmp_path / "b.onnx")
    assert result.exit_code == 2
    assert (
        "b.onnx is named like the format onnx, not torch-export. Name it *.pt2, or use --format onnx." in result.stderr
    )
    assert not (tmp_path / "b.onnx").exists()
    result = export(vectors, "--private", "--output", tmp_path / "b.pt2")
    assert (result.exit_code, "--private is for --push" in result.stderr) == (2, True)
    assert not (tmp_path / "b.pt2").exists()


def test_by_default_it_is_torch_export_beside_the_model(vectors: Path) -> None:
    before = (vectors / "model.safetensors").read_bytes()
    for _ in range(2):  # a second time it is replaced
        assert export(vectors).exit_code == 0
        assert_same(vectors / "model.pt2", "torch-export", load_run(vectors))
    assert sorted(path.name for path in vectors.iterdir()) == ["model.pt2", "model.safetensors", "records.jsonl"]
    assert (vectors / "model.safetensors").read_bytes() == before


def test_averaged_weights_have_a_file_of_their_own(tmp_path: Path) -> None:
    spec = make_spec(DATASETS["DebugVector"], "ERM", [0], steps=5, hparams={"batch_size": 8}, averages=["ema"])
    RunFolder(tmp_path).train(spec, load_dataset("DebugVector"), CPU)
    for options in ((), ("--average", "ema")):
        assert export(tmp_path, *options).exit_code == 0
    assert_same(tmp_path / "model.pt2", "torch-export", load_run(tmp_path))
    assert_same(tmp_path / "model-ema.pt2", "torch-export", load_run(tmp_path, average="ema"))


def test_a_method_with_context_is_pointed_out(tmp_path: Path) -> None:
    folder = train(tmp_path, "DebugVector", "ARM", batch_size=8, mlp_width=16)
    assert "ARM treats each batch as examples of one environment" in export(folder).stdout


def test_a_file_that_computes_something_else_is_not_written(
    vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> Callable[[Tensor], Tensor]:
        assert path.parent == tmp_path
        assert path.stat().st_size > 0
        return lambda x: torch.zeros(len(x), 2)

    kept = tmp_path / "model.onnx"
    kept.write_text("an older one")
    entry = exporting.FORMATS["onnx"]
    changed = exporting.ExportFormat(entry.suffix, entry.write, read)
    monkeypatch.setitem(exporting.FORMATS, "onnx", changed)
    with pytest.raises(SandmaskError, match="does not match the run"):
        export_run(load_run(vectors), "onnx", kept)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert kept.read_text() == "an older one"


def test_what_pytorch_cannot_export_is_told(vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    monkeypatch.setattr(TrainedRun, "module", lambda self: Branching())
    with pytest.raises(SandmaskError, match=r"PyTorch cannot export mlp \(ERM\) as torch-export: "):
        export_run(load_run(vectors), "torch-export")


def test_mistakes_are_told(vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = export(vectors, "--format", "onyx")
    assert (unknown.exit_code, unknown.stderr) == (
        2,
        "error: Unknown export format 'onyx'. Did you mean 'onnx'? Choose from: torch-export, onnx.\n",
    )
    folder = export(vectors, "--output", tmp_path)
    assert (folder.exit_code, "is a folder. Name the file" in folder.stderr) == (2, True)
    os.mkfifo(tmp_path / "pipe")
    pipe = export(vectors, "--output", tmp_path / "pipe")
    assert (pipe.exit_code, "is a device. Name the file" in pipe.stderr) == (2, True)
    screen = export(vectors, "--output", "-")
    assert (screen.exit_code, "Name a file" in screen.stderr) == (2, True)
    (tmp_path / "file").write_text("")
    below = export(vectors, "--output", tmp_path / "file" / "model.pt2")
    assert (below.exit_code, "cannot be written" in below.stderr) == (2, True)
    assert export(tmp_path / "nowhere").exit_code == 2
    monkeypatch.setattr(exporting, "find_spec", lambda name: None if name == "onnxscript" else name)
    missing = export(vectors, "--format", "onnx")
    assert missing.exit_code == 2
    assert "needs onnxscript: pip install 'sandmask[export]'" in missing.stderr


def test_a_model_too_large_for_one_file(vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_ONNX_LIMIT", 100)
    with pytest.raises(SandmaskError, match="Use torch-export"):
        export_run(load_run(vectors), "onnx")
    assert not (vectors / "model.onnx").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no files from anyone")
@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_a_folder_that_takes_no_files_is_named_before_anything_is_exported(vectors: Path, name: str) -> None:
    result = export(vectors, "--output", Path("/proc") / name)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: /proc/{name} cannot be written: ")
    assert "PyTorch" not in result.stderr


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_a_full_disk_is_named_and_leaves_nothing(vectors: Path, tmp_path: Path, name: str) -> None:
    program = f"from sandmask.training import *; export_run(load_run({str(vectors)!r}), output={name!r})"
    done = subprocess.run(
        [sys.executable, "-B", "-c", program],  # -B: Python would keep bytecode files that are cut off at the limit
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert done.stderr.rstrip().endswith(f"SandmaskError: {name} cannot be written: File too large.")
    assert list(tmp_path.iterdir()) == []
