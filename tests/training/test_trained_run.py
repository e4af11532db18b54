"""Trained runs read back from their folders: the same numbers as in training, and mistakes told."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import sandmask
from sandmask.datasets import DATASETS, Dataset, TensorDataset, load_dataset
from sandmask.errors import SandmaskError
from sandmask.records import RecordWriter, RunRecord, RunSpec
from sandmask.training import (
    Progress,
    RunFolder,
    Stack,
    TrainedRun,
    Trainer,
    load_run,
    make_spec,
    split_environment,
)
from sandmask.training.checkpoint import load_metadata, save_tree

Specs = Callable[..., RunSpec]
Interrupts = Callable[[int], Callable[[Progress], None]]
CPU = torch.device("cpu")


def accuracies(run: TrainedRun, dataset: Dataset) -> tuple[list[float], list[float]]:
    """Accuracies on the "in" and the "out" splits, counted the obvious way."""
    found: tuple[list[float], list[float]] = ([], [])
    for env in range(len(dataset.environments)):
        for split, numbers in zip(found, split_environment(dataset, env, run.spec.trial_seed), strict=True):
            hits = 0
            for some in torch.split(numbers, 64):  # what evaluation shows to methods with context at a time
                names = run.classify(dataset.inputs(some))
                hits += sum(dataset.classes[y] == name for y, name in zip(dataset.labels[some], names, strict=True))
            split.append(hits / len(numbers))
    return found


def assert_reproduces(record: RunRecord, run: TrainedRun, dataset: Dataset) -> None:
    inside, outside = accuracies(run, dataset)
    np.testing.assert_array_equal(record.accuracy_in[-1], inside)
    np.testing.assert_array_equal(record.accuracy_out[-1], outside)


@pytest.mark.parametrize("algorithm", ["ERM", "SANDMask-released", "MTL", "ARM", "SagNet", "CDANN"])
def test_accuracies_are_those_of_the_last_evaluation(
    algorithm: str, tmp_path: Path, dataset: Dataset, spec_of: Specs
) -> None:
    record = RunFolder(tmp_path).train(spec_of(algorithm, steps=8), dataset, CPU)
    run = sandmask.load_run(tmp_path)
    assert run.uses_context == (algorithm in ("MTL", "ARM"))
    assert_reproduces(record, run, dataset)
    assert_reproduces(run.record(), run, dataset)


@pytest.mark.parametrize("algorithm", ["ERM", "ARM"])
def test_accuracies_of_a_convnet(algorithm: str, tmp_path: Path) -> None:
    data = load_dataset("Debug28")
    spec = make_spec(DATASETS["Debug28"], algorithm, [1], steps=3, hparams={"batch_size": 4})
    record = RunFolder(tmp_path).train(spec, data, CPU)
    assert 0.0 < record.accuracy_in[-1].min() < 1.0  # perfection would not tell much
    assert_reproduces(record, load_run(tmp_path), data)


def test_the_run_says_what_it_is(tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    RunFolder(tmp_path).train(spec_of(), dataset, CPU)
    run = load_run(tmp_path)
    assert run.spec == spec_of()
    assert (run.classes, run.environments, run.input_shape) == (("0", "1"), ("a", "b", "c"), (8,))
    assert repr(run) == f"TrainedRun(ERM on DebugVector, 2 classes, {str(tmp_path)!r})"


def test_probabilities_logits_and_names_agree(tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    RunFolder(tmp_path).train(spec_of(), dataset, CPU)
    run = load_run(tmp_path)
    x = dataset.inputs(torch.arange(20))
    logits = run.logits(x)
    assert (logits.shape, logits.dtype, logits.requires_grad) == ((20, 2), torch.float32, False)
    torch.testing.assert_close(run.predict(x), logits.softmax(-1))
    assert run.classify(x) == ["01"[number] for number in logits.argmax(-1)]
    torch.testing.assert_close(run.logits(x, batch_size=3), logits)
    torch.testing.assert_close(run.logits(x.numpy().astype(np.float64)), logits)
    torch.testing.assert_close(run.logits(list(x)), logits)
    torch.testing.assert_close(run.logits(each for each in x.numpy()), logits)
    assert run.predict(x[:0]).shape == run.predict([]).shape == (0, 2)
    assert run.classify(x[:0]) == run.classify([]) == []


@pytest.mark.parametrize("algorithm", ["MTL", "ARM"])
def test_methods_with_context_see_the_whole_batch(
    algorithm: str, tmp_path: Path, dataset: Dataset, spec_of: Specs
) -> None:
    RunFolder(tmp_path).train(spec_of(algorithm), dataset, CPU)
    run = load_run(tmp_path)
    x = dataset.inputs(torch.arange(300) % 192)
    torch.testing.assert_close(run.logits(x, batch_size=7), run.logits(x))
    assert not torch.allclose(run.logits(x[:10]), run.logits(x)[:10])
    assert run.predict(x[:0]).shape == (0, 2)


def test_the_model_file_is_enough(tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    RunFolder(tmp_path / "run").train(spec_of(), dataset, CPU)
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "run" / "model.safetensors", tmp_path / "copy")
    x = dataset.inputs(torch.arange(9))
    run = load_run(str(tmp_path / "copy"))
    assert torch.equal(run.predict(x), load_run(tmp_path / "run").predict(x))
    with pytest.raises(SandmaskError, match=r"no records\.jsonl in the folder of the model"):
        run.record()


def test_a_programs_settings_are_left_alone(tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    try:
        torch.set_float32_matmul_precision("medium")
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = True, False, True
        Trainer(Stack([spec_of()], dataset, CPU), tmp_path / "checkpoint.safetensors").run()
        RunFolder(tmp_path / "run").train(spec_of(), dataset, CPU)
        load_run(tmp_path / "run").predict(dataset.inputs(torch.arange(2)))
        assert torch.get_float32_matmul_precision() == "medium"
        assert (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark) == (True, False, True)
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before[1:]


def test_bytes_are_scaled_where_the_model_learned_on_bytes(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    parts = [
        (torch.randint(0, 256, (10, 1, 28, 28), dtype=torch.uint8, generator=draws), torch.arange(10) % 4)
        for _ in range(3)
    ]
    data = TensorDataset("Debug28", ("a", "b", "c"), ("0", "1", "2", "3"), parts)
    spec = make_spec(DATASETS["Debug28"], "ERM", [0], steps=1, hparams={"batch_size": 2})
    RunFolder(tmp_path).train(spec, data, CPU)
    run = load_run(tmp_path)
    expected = run.predict(data.inputs(torch.arange(10)))
    assert torch.equal(run.predict(parts[0][0]), expected)
    assert torch.equal(run.predict(parts[0][0].numpy()), expected)
    assert torch.equal(run.predict(list(parts[0][0].numpy())), expected)
    integers = parts[0][0].numpy().astype(np.int64)
    np.save(tmp_path / "x.npy", integers)
    np.savetxt(tmp_path / "x.csv", integers.reshape(10, -1), delimiter=",", fmt="%d")
    for name in ("x.npy", "x.csv"):  # they are not scaled, so they must not pass for preprocessed numbers
        with pytest.raises(SandmaskError, match=r"int64\. Convert .* to float32, and pixels from 0 to 255 to uint8"):
            sandmask.predict(run, tmp_path / name)


@pytest.mark.parametrize("integers", [torch.arange(16).reshape(2, 8), np.arange(16, dtype=np.int16).reshape(2, 8)])
def test_integers_are_numbers(integers: object, tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    RunFolder(tmp_path).train(spec_of(steps=1), dataset, CPU)
    run = load_run(tmp_path)
    assert torch.equal(run.predict(integers), run.predict(torch.arange(16.0).reshape(2, 8)))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 7), r"integer arrays of shape \[8\], in a batch of shape \[N, 8\]. Found the shape \[3, 7\]"),
        (torch.zeros(8), r"Found the shape \[8\]"),
        (torch.zeros(2, 8, 1), r"Found the shape \[2, 8, 1\]"),
        (torch.tensor(1.0), r"Found the shape \[\]"),
        (torch.zeros(3, 8, dtype=torch.bool), r"Found torch\.bool"),
        (torch.zeros(3, 8, dtype=torch.uint8), r"Found torch\.uint8. Convert .* to float32"),
        (np.zeros((3, 8), dtype=np.uint8), "Found uint8"),
        (np.array([["a"] * 8]), "Found <U1"),
        ([torch.zeros(8), torch.zeros(9)], r"of shape \[8\]\. Found the shape \[9\]"),
        ("photo.jpg", "Found str"),
        (3.5, "Found float"),
    ],
)
def test_wrong_inputs_are_told(x: object, message: str, tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    RunFolder(tmp_path).train(spec_of(steps=1), dataset, CPU)
    with pytest.raises(SandmaskError, match=message):
        load_run(tmp_path).predict(x)


def test_a_batch_size_of_zero_is_told(tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    RunFolder(tmp_path).train(spec_of(steps=1), dataset, CPU)
    with pytest.raises(SandmaskError, match="`batch_size` should be at least 1"):
        load_run(tmp_path).predict(torch.zeros(1, 8), batch_size=0)


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match=f"There is no folder or file {tmp_path / 'nowhere'}"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(SandmaskError, match=r"neither model\.safetensors nor records\.jsonl"):
        load_run(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"hello")
    with pytest.raises(SandmaskError, match=r"model\.safetensors cannot be read"):
        load_run(tmp_path)


def test_an_unfinished_run(tmp_path: Path, dataset: Dataset, spec_of: Specs, interrupt_at: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt):
        RunFolder(tmp_path).train(spec_of(), dataset, CPU, on_progress=interrupt_at(7))
    with pytest.raises(SandmaskError, match="not finished: 6 of 12 steps are recorded"):
        load_run(tmp_path)


def test_a_finished_run_without_its_model(tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    RunFolder(tmp_path).train(spec_of(), dataset, CPU)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SandmaskError, match=r"no model\.safetensors, although its run is finished"):
        load_run(tmp_path)


def test_a_diverged_run(tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    RunFolder(tmp_path).train(spec_of(hparams={"lr": 1e30}), dataset, CPU)
    for _ in range(2):  # with its model, and without
        with pytest.raises(SandmaskError, match=r"diverged: .*smaller learning rate"):
            load_run(tmp_path)
        (tmp_path / "model.safetensors").unlink(missing_ok=True)


def test_records_of_several_runs(tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    with RecordWriter(tmp_path / "records.jsonl") as writer:
        for seed in range(2):
            writer.start(spec_of(seed=seed, steps=1), dataset.environments)
    with pytest.raises(SandmaskError, match="records of 2 runs and no model"):
        load_run(tmp_path)


def test_a_file_of_another_version(tmp_path: Path) -> None:
    save_tree(tmp_path / "model.safetensors", {"a": torch.zeros(1)}, {"spec": {"colour": "blue"}})
    with pytest.raises(SandmaskError, match="written by another version of sandmask"):
        load_run(tmp_path)


def test_an_algorithm_that_is_not_registered(tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    RunFolder(tmp_path).train(spec_of(steps=1), dataset, CPU)
    path = tmp_path / "model.safetensors"
    metadata = load_metadata(path)
    metadata["spec"]["algorithm"] = "Mine"
    save_tree(path, load_file(path), metadata)
    with pytest.raises(SandmaskError, match=r"'Mine', which is not registered here.*--plugin"):
        load_run(tmp_path)


def test_weights_that_do_not_fit(tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    RunFolder(tmp_path).train(spec_of(steps=1), dataset, CPU)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["params.classifier.bias"]
    save_tree(path, weights, load_metadata(path))
    with pytest.raises(SandmaskError, match=r"entries params\.classifier\.bias differ"):
        load_run(tmp_path)


def test_the_module_is_an_ordinary_one(tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    RunFolder(tmp_path).train(spec_of("ANDMask"), dataset, CPU)
    run = load_run(tmp_path)
    module = run.module()
    x = dataset.inputs(torch.arange(30))
    expected = run.logits(x)
    assert not module.training
    torch.testing.assert_close(module(x), expected)
    weights = {f"params.{name}": value for name, value in module.state_dict().items()}
    stored = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)
    assert isinstance(module.classifier, nn.Linear)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module(x).square().sum().backward()
    optimizer.step()
    assert not torch.allclose(module(x), expected)
    assert torch.equal(run.logits(x), expected)  # the module has weights of its own


@pytest.mark.parametrize("algorithm", ["MTL", "ARM"])
def test_the_module_of_a_method_with_context(algorithm: str, tmp_path: Path, dataset: Dataset, spec_of: Specs) -> None:
    RunFolder(tmp_path).train(spec_of(algorithm), dataset, CPU)
    run = load_run(tmp_path)
    module = run.module()
    x: Tensor = dataset.inputs(torch.arange(10))
    torch.testing.assert_close(module(x), run.logits(x))
    module(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_bf16_predicts_as_it_was_evaluated_and_its_module_computes_in_float32(tmp_path: Path) -> None:
    data = load_dataset("Debug28")
    spec = make_spec(DATASETS["Debug28"], "ERM", [0], steps=3, hparams={"batch_size": 4}, precision="bf16")
    record = RunFolder(tmp_path).train(spec, data, CPU)
    run = load_run(tmp_path)
    assert_reproduces(record, run, data)
    x = data.inputs(torch.arange(8))
    in_float32, in_bf16 = run.module()(x).detach(), run.logits(x)
    assert in_bf16.dtype == in_float32.dtype == torch.float32
    difference = float((in_float32 - in_bf16).abs().max())
    assert 0 < difference < 0.05 * float(in_float32.abs().max())
    as_fp32 = replace(spec, precision="fp32")
    metadata = load_metadata(tmp_path / "model.safetensors")
    save_tree(
        tmp_path / "model.safetensors",
        load_file(tmp_path / "model.safetensors"),
        {**metadata, "spec": as_fp32.to_json()},
    )
    torch.testing.assert_close(load_run(tmp_path).logits(x), in_float32)
