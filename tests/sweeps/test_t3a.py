"""T3A against loops over examples and supports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

import sandmask
from sandmask.api import Sweep
from sandmask.cli._app import app
from sandmask.datasets import load_dataset
from sandmask.errors import SandmaskError
from sandmask.records import measured
from sandmask.selection import is_soup
from sandmask.sweeps._t3a import SUPPORTS, Classified, t3a
from sandmask.training import RunFolder, load_run, split_environment

HERE = {"device": "cpu", "workers": 1, "calibrate": False, "progress": False}
SIZE = {"mlp_width": 8, "mlp_depth": 3, "batch_size": 8}


def slow_t3a(features: Tensor, classifier: nn.Linear, count: int, arriving: int = 32) -> list[int]:
    """The predictions of T3A, by lists of (entropy, features) for each class."""

    def entropy(x: Tensor) -> float:
        shares = classifier(x).softmax(-1)
        return float(-(shares * shares.log()).sum())

    supports: list[list[tuple[float, Tensor]]] = [[] for _ in range(classifier.out_features)]
    for row in classifier.weight:
        supports[int(classifier(row).argmax())].append((entropy(row), row))
    predictions = []
    for start in range(0, len(features), arriving):
        batch = features[start : start + arriving]
        for z in batch:
            supports[int(classifier(z).argmax())].append((entropy(z), z))
        if count:
            supports = [sorted(some, key=lambda pair: pair[0])[:count] for some in supports]
        prototypes = []
        for some in supports:
            total = sum((x / x.norm() for _, x in some), torch.zeros(features.shape[1], dtype=features.dtype))
            prototypes.append(total / max(float(total.norm()), 1e-12))
        predictions += [max(range(len(prototypes)), key=lambda c: float(z @ prototypes[c])) for z in batch]
    return predictions


@pytest.mark.parametrize("count", SUPPORTS)
def test_t3a_predicts_as_a_loop_over_supports_does(count: int) -> None:
    torch.manual_seed(0)
    classifier = nn.Linear(6, 4).double()
    features = torch.randn(300, 6, dtype=torch.float64) + 1.0
    with torch.no_grad():
        found = t3a(features, classifier(features), classifier.weight, classifier(classifier.weight), count)
        expected = slow_t3a(features, classifier, count)
        plain = classifier(features).argmax(1).tolist()
    assert found.argmax(1).tolist() == expected
    assert expected != plain


def test_all_supports_are_kept_as_one_sum_of_each_class() -> None:
    torch.manual_seed(0)
    classifier, features = nn.Linear(64, 2), torch.randn(3200, 64)
    with torch.no_grad(), _LargestResult() as largest:
        t3a(features, classifier(features), classifier.weight, classifier(classifier.weight), 0)
    assert largest.size < features.numel() / 10


class _LargestResult(TorchFunctionMode):
    """The number of elements of the largest tensor that a function of torch returns."""

    size = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.size = max(self.size, result.numel())
        return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("t3a") / "sweep"
    asked = {"test_envs": ["b"], "n_hparams": 3, "n_trials": 1, "steps": 20, "checkpoint_every": 10}
    more = {"keep_models": "best", "metrics": "f1", "averages": "sma"}
    sandmask.sweep(place, "DebugVector", "ERM", hparams=SIZE, **asked, **more, **HERE)  # type: ignore[arg-type]
    return place


def test_the_best_model_adapts_to_each_split_with_the_supports_that_suit_validation(folder: Path) -> None:
    made = sandmask.soup(folder, "t3a", device="cpu")
    assert made["average"].isin([None, "sma"]).all()
    assert (made["members"] == 1).all()
    assert (made["candidates"] == 3).all()
    row = made[made["average"].isna()].iloc[0]
    record = RunFolder(Path(row["folder"])).record()
    kept = Sweep.read(folder).models()
    best = kept[kept["average"].isna()].sort_values(["validation", "hparams_seed"], ascending=False)["run"].iloc[0]
    module = load_run(folder, run=best).module()
    classifier = next(layer for name, layer in module.named_modules() if name.endswith("classifier"))
    assert isinstance(classifier, nn.Linear)
    features: list[Tensor] = []
    classifier.register_forward_pre_hook(lambda _, args: features.append(args[0]))

    data, generator = load_dataset("DebugVector"), torch.Generator().manual_seed(0)
    splits = [
        [(members := split_environment(data, env, 0)[split])[torch.randperm(len(members), generator=generator)]
         for split in range(2)]
        for env in range(3)
    ]  # fmt: skip
    accuracies = {}
    with torch.no_grad():
        for count in SUPPORTS:
            found = torch.zeros(2, 3, dtype=torch.float64)
            for env in range(3):
                for split in range(2):
                    features.clear()
                    module(data.inputs(splits[env][split]))
                    answers = torch.tensor(slow_t3a(features[0], classifier, count))
                    found[split, env] = (answers == data.labels[splits[env][split]]).double().mean()
            accuracies[count] = found
    chosen = max(SUPPORTS, key=lambda count: float(accuracies[count][1, [0, 2]].mean()))
    torch.testing.assert_close(torch.tensor(record.accuracy_in[0]), accuracies[chosen][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.tensor(record.accuracy_out[0]), accuracies[chosen][1], rtol=0, atol=1e-6)
    assert row["validation"] == pytest.approx(float(accuracies[chosen][1, [0, 2]].mean()))
    assert measured(record, "f1", "in") is not None
    assert record.spec.hparams["supports"] == chosen


def test_reports_show_t3a_beside_the_method_and_do_not_rank_it(folder: Path) -> None:
    sandmask.soup(folder, "t3a", device="cpu")
    report = sandmask.report(folder, ["training-domain"])
    table = report.rules[0].datasets["DebugVector"]
    assert set(table.methods) == {"ERM", "ERM + SMA", "ERM + T3A", "ERM + SMA + T3A"}
    averages = report.rules[0].averages
    assert averages is not None
    for shown in (table, averages):
        assert "T3A adapts the model to unlabelled examples of the held-out environment." in shown.notes
    statistics = report.rules[0].statistics
    assert statistics is not None
    unranked = {each.method for each in statistics.comparisons if each.mean_rank is None}
    assert unranked == {"ERM + T3A", "ERM + SMA + T3A"}
    assert is_soup("ERM + SMA + T3A")
    with pytest.raises(SandmaskError, match="adapted by T3A, which has no model file, only a record"):
        load_run(next((folder / "soups").glob("*t3a*")))


def test_of_ties_the_model_that_reports_select_adapts(tmp_path: Path) -> None:
    asked = {"test_envs": ["b"], "n_hparams": 3, "n_trials": 1, "steps": 5, "keep_models": "best", "shared_init": True}
    sandmask.sweep(tmp_path, "DebugVector", "ERM", hparams={**SIZE, "lr": 0}, **asked, **HERE)  # type: ignore[arg-type]
    made = sandmask.soup(tmp_path, "t3a", device="cpu").iloc[0]
    table = sandmask.report(tmp_path).rules[0].datasets["DebugVector"]
    selected = table.cells["ERM", "b"].trials[0].selected
    assert selected is not None
    adapted = RunFolder(Path(made["folder"])).record().spec.hparams
    assert {name: adapted[name] for name in selected.run.spec.hparams} == selected.run.spec.hparams


def test_a_model_whose_features_overflow_can_adapt(folder: Path) -> None:
    run = load_run(folder, run=Sweep.read(folder).models()["run"].iloc[0])
    state = {**run._state, "params": run._state["params"] * 1e30}
    data = load_dataset("DebugVector")
    plain = Classified.by(run._algorithm, state, data, run.spec)
    assert not plain.features.isfinite().all()
    adapted = plain.adapted(0).inputs(torch.arange(len(data.labels)))
    assert adapted.isfinite().all()


def test_the_command_counts_each_kind_by_its_name(folder: Path) -> None:
    options = ["soup", str(folder), "--device", "cpu"]
    printed = CliRunner().invoke(app, [*options, "--kind", "ensemble,t3a", "--of", "weights"]).stdout
    assert printed.startswith("1 ensemble, 1 adapted model ")
    assert CliRunner().invoke(app, [*options, "--kind", "t3a"]).stdout.startswith("2 adapted models ")


def test_t3a_needs_a_linear_classifier(tmp_path: Path) -> None:
    asked = {"test_envs": ["b"], "n_hparams": 1, "n_trials": 1, "steps": 3, "keep_models": "last", **HERE}
    sandmask.sweep(tmp_path, "DebugVector", ["ARM"], hparams=SIZE, **asked)  # type: ignore[arg-type]
    with pytest.raises(SandmaskError, match="No T3A of ARM on DebugVector is possible: its predictions"):
        sandmask.soup(tmp_path, "t3a", device="cpu")
