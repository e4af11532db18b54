"""Metrics beyond accuracy against plain loops over the examples."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sandmask.datasets import Dataset, load_dataset
from sandmask.errors import SandmaskError
from sandmask.records import (
    MEASURES,
    RunRecord,
    RunSpec,
    class_counts,
    confusion_counts,
    frame,
    measured,
    parse_measures,
    read_runs,
    split_averages,
    write_archive,
)
from sandmask.training import Progress, RunFolder, Stack, load_run, split_environment, train_stack

Specs = Callable[..., RunSpec]
Interrupts = Callable[[int], Callable[[Progress], None]]
ALL = tuple(MEASURES)


def naive_f1(answers: list[int], labels: list[int], n_classes: int) -> float:
    scores = []
    for c in range(n_classes):
        both = sum(a == c and y == c for a, y in zip(answers, labels, strict=True))
        predicted, true = answers.count(c), labels.count(c)
        if predicted or true:
            precision, recall = both / predicted if predicted else 0.0, both / true if true else 0.0
            scores.append(2 * precision * recall / (precision + recall) if both else 0.0)
    return float(np.mean(scores))


def naive_ece(probabilities: NDArray[np.float32], labels: list[int]) -> float:
    """Fifteen bins of equal width, closed on the right."""
    total = 0.0
    for low in range(15):
        inside = [i for i, p in enumerate(probabilities) if low / 15 < float(p.max()) <= (low + 1) / 15]
        if inside:
            confidence = float(np.mean([float(probabilities[i].max()) for i in inside]))
            accuracy = float(np.mean([float(probabilities[i].argmax() == labels[i]) for i in inside]))
            total += abs(confidence - accuracy) * len(inside) / len(labels)
    return total


def naive_confusion(answers: list[int], labels: list[int], n_classes: int) -> NDArray[np.int64]:
    table = np.zeros((n_classes, n_classes), dtype=np.int64)
    for answer, label in zip(answers, labels, strict=True):
        table[label, answer] += 1
    return table


@pytest.mark.parametrize("algorithm", ["ERM", "ARM"], ids=["alone", "in context"])
def test_metrics_are_what_a_loop_over_the_examples_gives(
    algorithm: str, spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    spec = spec_of(algorithm, trial_seed=1, hparams={"lr": 0.05})
    record = RunFolder(tmp_path).train(spec, dataset, device, metrics=ALL)
    model, n_classes = load_run(tmp_path), len(dataset.classes)
    counts, of_class = confusion_counts(record), class_counts(record)
    assert counts is not None
    assert of_class is not None
    answered: set[int] = set()
    for env in range(len(dataset.environments)):
        for s, (split, numbers) in enumerate(zip(("in", "out"), split_environment(dataset, env, 1), strict=True)):
            labels = dataset.labels[numbers].tolist()
            batches = torch.split(numbers, 64)  # ARM's prediction depends on the batch, which evaluation takes so
            logits = torch.cat([model.logits(dataset.inputs(some)) for some in batches])
            answers = logits.argmax(-1).tolist()
            answered.update(answers)
            table = naive_confusion(answers, labels, n_classes)
            np.testing.assert_array_equal(counts[-1, s, env], table)
            np.testing.assert_array_equal(of_class[-1, s, env], np.stack([table.diagonal(), table.sum(1)], 1))
            expected = {
                "f1": naive_f1(answers, labels, n_classes),
                "ece": naive_ece(logits.softmax(-1).numpy(), labels),
                "worst-group": min(table[c, c] / table[c].sum() for c in range(n_classes) if table[c].sum()),
            }
            for name, value in expected.items():
                found = measured(record, name, split)
                assert found is not None
                np.testing.assert_allclose(found[-1, env], value, rtol=0, atol=1e-6 if name == "ece" else 1e-12)
    assert len(answered) > 1, "a model that always answers the same tells little"


@pytest.fixture
def specs(spec_of: Specs) -> list[RunSpec]:
    return [spec_of("ERM", (k % 3,), seed=k, trial_seed=k, averages=["sma", "swad"]) for k in range(3)]


def same(one: RunRecord, other: RunRecord) -> bool:
    return (
        one.metrics.keys() == other.metrics.keys()
        and all(np.array_equal(one.metrics[name], other.metrics[name], equal_nan=True) for name in one.metrics)
        and one.tables.keys() == other.tables.keys()
        and all(np.array_equal(one.tables[name], other.tables[name]) for name in one.tables)
    )


def test_stacked_alone_and_resumed_have_the_same_metrics(
    specs: list[RunSpec], dataset: Dataset, device: torch.device, tmp_path: Path, interrupt_at: Interrupts
) -> None:
    stacked = train_stack(specs, dataset, device, tmp_path / "all", metrics=ALL)
    assert {"f1/out/2", "average/sma/ece/in/0"} <= stacked[0].metrics.keys()
    assert {"confusion", "average/sma/per-class"} <= stacked[0].tables.keys()

    with pytest.raises(KeyboardInterrupt):
        train_stack(specs, dataset, device, tmp_path / "parts", metrics=ALL, on_progress=interrupt_at(7))
    resumed = train_stack(specs, dataset, device, tmp_path / "parts", metrics=ALL)
    assert all(same(one, other) for one, other in zip(resumed, stacked, strict=True))
    for spec, run in zip(specs, stacked, strict=True):
        (alone,) = train_stack([spec], dataset, device, tmp_path / spec.id, metrics=ALL)
        for name, counts in run.tables.items():
            np.testing.assert_array_equal(counts, alone.tables[name])
        for name, curve in run.metrics.items():  # steps round differently in a stack
            np.testing.assert_allclose(curve, alone.metrics[name], rtol=0, atol=1e-5)


def test_without_metrics_a_run_is_the_same(
    specs: list[RunSpec], dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    plain = train_stack(specs, dataset, device, tmp_path / "plain")
    more = train_stack(specs, dataset, device, tmp_path / "more", metrics=["f1"])
    for one, other in zip(plain, more, strict=True):
        assert one.spec.id == other.spec.id
        assert not one.tables
        np.testing.assert_array_equal(one.accuracy_out, other.accuracy_out)
        assert one.metrics.keys() < other.metrics.keys()


def test_records_keep_metrics_in_lines_and_archives(
    specs: list[RunSpec], dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    (run, *others) = train_stack(specs, dataset, device, tmp_path / "stack", metrics=ALL)
    write_archive([run, *others], tmp_path / "some.records.parquet")
    assert all(
        same(one, other)
        for one, other in zip([run, *others], read_runs(tmp_path / "some.records.parquet"), strict=True)
    )
    (alone,) = train_stack([run.spec], dataset, device, tmp_path / "alone", metrics=ALL)
    assert same(RunFolder(tmp_path / "run").train(run.spec, dataset, device, metrics=ALL), alone)
    of_average = {one.spec.options.get("average"): one for one in split_averages([run])}
    f1 = measured(of_average["sma"], "f1", "out")
    assert f1 is not None
    assert f1.shape == (4, 3)
    assert len(of_average["swad"].steps) == 1
    assert confusion_counts(of_average["swad"]) is not None
    table = frame([run])
    one = table[(table["step"] == 5) & (table["env"] == 2) & (table["options"] == "average=sma")]
    assert one["out_f1"].tolist() == [f1[1, 2]]
    assert not [name for name in table if str(name).startswith(("f1/", "average/"))]


def test_a_checkpoint_goes_on_with_the_metrics_that_it_began_with(
    specs: list[RunSpec], dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_stack(specs, dataset, device, tmp_path / "stack", metrics=["f1"], on_progress=stop)
    with pytest.raises(SandmaskError, match="was started with --metrics f1"):
        train_stack(specs, dataset, device, tmp_path / "stack")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_evaluation_counts_as_an_eager_one(specs: list[RunSpec], dataset: Dataset, tmp_path: Path) -> None:
    gpu = torch.device("cuda")
    captured, eager = (
        train_stack(
            specs, dataset, gpu, tmp_path / str(fast), metrics=ALL, fast=fast, keep="best", models=tmp_path / "m"
        )
        for fast in (True, False)
    )
    assert all(same(one, other) for one, other in zip(captured, eager, strict=True))


def test_names_of_metrics() -> None:
    assert parse_measures(["Confusion", "F1"]) == ("f1", "confusion")
    assert parse_measures(["all"]) == ALL
    with pytest.raises(SandmaskError, match="Unknown metric 'f2'"):
        parse_measures(["f2"])


def test_a_metric_that_is_too_large_is_refused(
    spec_of: Specs, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandmask.training.specs.MOST_NUMBERS", 100)
    with pytest.raises(SandmaskError, match=r"'confusion' of DebugVector has .* numbers per run"):
        Stack([spec_of(steps=101)], load_dataset("DebugVector"), device, metrics=["confusion"])
