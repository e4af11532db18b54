"""UniDG against a module that trains with `torch.optim.Adam`."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sandmask
from sandmask.api import Sweep
from sandmask.datasets import Dataset, load_dataset
from sandmask.errors import SandmaskError
from sandmask.sweeps._t3a import SUPPORTS, Classified
from sandmask.sweeps._unidg import tuned
from sandmask.training import RunFolder, TrainedRun, load_run, split_environment

HERE = {"device": "cpu", "workers": 1, "calibrate": False, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("unidg") / "sweep"
    asked = {"test_envs": ["b"], "n_hparams": 2, "n_trials": 1, "steps": 20, "checkpoint_every": 10}
    more = {"keep_models": "best", "hparams": {"mlp_width": 8, "mlp_depth": 3, "batch_size": 8, "lr": 0.05}}
    sandmask.sweep(place, "DebugVector", "ERM", **asked, **more, **HERE)  # type: ignore[arg-type]
    return place


@pytest.fixture(scope="module")
def best(folder: Path) -> TrainedRun:
    kept = Sweep.read(folder).models().sort_values(["validation", "hparams_seed"], ascending=False)
    return load_run(folder, run=kept["run"].iloc[0])


def slow(module: nn.Module, x: Tensor, lr: float, penalty: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The features and logits of each minibatch, from before the step on it."""
    trained, fixed = deepcopy(module), module.get_submodule("featurizer")
    featurizer, classifier = trained.get_submodule("featurizer"), trained.get_submodule("classifier")
    optimizer = torch.optim.Adam(trained.parameters(), lr=lr)
    for start in range(0, len(x), 32):
        batch = x[start : start + 32]
        features = featurizer(batch)
        logits = classifier(features)
        shares = logits.softmax(1)
        excess = (features - fixed(batch).detach()) ** 2 - 0.1
        loss = -(shares * shares.log()).sum(1).mean() + penalty * torch.where(excess > 0, excess, 0.0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield features.detach(), logits.detach()


def splits(data: Dataset) -> Iterator[tuple[int, int, Tensor]]:
    """The environment, the split (0 is "in") and the examples of each split, in the order in which they arrive."""
    generator = torch.Generator().manual_seed(0)
    for env, split in product(range(3), range(2)):
        members = split_environment(data, env, 0)[split]
        yield env, split, members[torch.randperm(len(members), generator=generator)]


SETTINGS = [(rate, penalty) for rate in (0.1, 1.0) for penalty in (1.0, 0.1)]


def test_the_network_trains_on_each_split_as_a_module_does(best: TrainedRun) -> None:
    data = load_dataset("DebugVector")
    plain = Classified.by(best._algorithm, best._state, data, best.spec)
    found = list(tuned(best._algorithm, best._state, plain))
    assert [tuple(settings.values()) for settings, _ in found] == SETTINGS
    for (rate, penalty), (_, classified) in zip(SETTINGS, found, strict=True):
        assert not torch.allclose(classified.features, plain.features, rtol=0.1)
        for _, _, members in splits(data):
            expected = zip(*slow(best.module(), data.inputs(members), rate * 0.05, penalty), strict=True)
            for numbers, parts in zip((classified.features, classified.logits), expected, strict=True):
                torch.testing.assert_close(numbers[members], torch.cat(parts), rtol=1e-3, atol=1e-3)


def test_the_settings_are_those_that_suit_validation(folder: Path, best: TrainedRun) -> None:
    made = sandmask.soup(folder, "unidg", device="cpu").iloc[0]
    record, data = RunFolder(Path(made["folder"])).record(), load_dataset("DebugVector")
    plain = Classified.by(best._algorithm, best._state, data, best.spec)
    accuracies = {}
    for settings, classified in tuned(best._algorithm, best._state, plain):
        for count in SUPPORTS:
            right = (classified.adapted(count).inputs(torch.arange(len(data.labels))).argmax(1) == data.labels).double()
            table = accuracies[*settings.values(), count] = torch.zeros(2, 3, dtype=torch.float64)
            for env, split, members in splits(data):
                table[split, env] = right[members].mean()
    chosen = max(accuracies, key=lambda settings: float(accuracies[settings][1, [0, 2]].mean()))
    for numbers, expected in zip((record.accuracy_in, record.accuracy_out), accuracies[chosen], strict=True):
        torch.testing.assert_close(torch.tensor(numbers[0]), expected, rtol=0, atol=1e-6)
    assert tuple(record.spec.hparams[name] for name in ("unidg_rate", "unidg_penalty", "supports")) == chosen


def test_reports_show_unidg_beside_t3a(folder: Path) -> None:
    sandmask.soup(folder, ["t3a", "unidg"], device="cpu")
    table = sandmask.report(folder).rules[0].datasets["DebugVector"]
    assert set(table.methods) == {"ERM", "ERM + T3A", "ERM + UniDG"}
    for name in ("T3A", "UniDG"):
        assert f"{name} adapts the model to unlabelled examples of the held-out environment." in table.notes
    with pytest.raises(SandmaskError, match="adapted by UniDG, which has no model file, only a record"):
        load_run(next((folder / "soups").glob("*unidg*")))
