import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sandmask.algorithms import ALGORITHMS
from sandmask.cli._app import app
from sandmask.datasets import DATASETS
from sandmask.hparams import resolve, space_for

runner = CliRunner()


def configuration(*args: str) -> dict[str, float]:
    result = runner.invoke(app, ["hparams", *args, "--json"])
    assert result.exit_code == 0, result.output
    values: dict[str, float] = json.loads(result.stdout)
    return values


def failure(*args: str) -> str:
    result = runner.invoke(app, ["hparams", *args])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_json_is_the_configuration_to_the_bit() -> None:
    published = {"batch_size": 39, "lr": 2.7028930742148706e-05, "weight_decay": 0.00044832883881609976}
    drawn = configuration("ERM", "VLCS", "--hparams-seed", "1", "--trial-seed", "0")
    assert drawn == {**published, "dropout": 0.5}


def test_seed_zero_is_the_defaults() -> None:
    assert configuration("ANDMask", "ColoredMNIST") == configuration(
        "ANDMask", "ColoredMNIST", "--hparams-seed", "0", "--trial-seed", "2"
    )
    assert configuration("ANDMask", "ColoredMNIST")["tau"] == 0.9
    assert configuration("ANDMask", "ColoredMNIST", "--space", "paper")["tau"] == 1.0


def test_spaces_differ_where_they_should() -> None:
    args = ("ANDMask", "ColoredMNIST", "--hparams-seed", "5")
    paper, domainbed = (configuration(*args, "--space", space) for space in ("paper", "domainbed"))
    assert {name for name in paper if paper[name] != domainbed[name]} == {"lr", "tau"}


@pytest.mark.parametrize("space", ["recipe", "paper", "domainbed"])
@pytest.mark.parametrize("dataset", ["Spirals", "ColoredMNIST", "PACS", "DomainNet"])
def test_every_algorithm_has_a_space_on_every_kind_of_dataset(dataset: str, space: str) -> None:
    for entry in ALGORITHMS.values():
        data = DATASETS[dataset]
        found = space_for(data.scope, data.name, entry.name, entry.hparams, space)
        for seed in (0, 1):
            values = resolve(found, seed)
            assert resolve(found, overrides=values) == values  # what is drawn is within bounds


def test_names_are_forgiving_and_so_is_their_order() -> None:
    assert configuration("and-mask", "coloredmnist") == configuration("ANDMask", "ColoredMNIST")
    assert configuration("ColoredMNIST", "ANDMask") == configuration("ANDMask", "ColoredMNIST")
    result = runner.invoke(app, ["hparams", "ColoredMNIST", "ANDMask", "--json"])
    assert result.stderr == "note: read as ANDMask on ColoredMNIST. `sandmask hparams` takes the algorithm first.\n"


def test_values_can_be_set_by_hand() -> None:
    values = configuration("ERM", "PACS", "--hparams-seed", "2", "--hparam", "lr=1e-4", "--hparam", "batch_size=16")
    assert values == {**configuration("ERM", "PACS", "--hparams-seed", "2"), "lr": 1e-4, "batch_size": 16}


def test_the_table_shows_value_default_and_range() -> None:
    result = runner.invoke(app, ["hparams", "ANDMask", "PACS", "--hparam", "lr=0.002"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "ANDMask on PACS, space 'recipe'" in result.stdout
    (line,) = (line.split(maxsplit=3) for line in result.stdout.splitlines() if line.strip().startswith("lr "))
    assert [part.strip() for part in line] == ["lr", "0.002", "5e-05", "10^U(-5, -3.5)"]


def test_mistakes_are_one_line_with_a_remedy() -> None:
    assert "Unknown algorithm 'ERN'. Did you mean 'ERM'?" in failure("ERN", "PACS")
    assert "Unknown dataset 'PASC'. Did you mean 'PACS'?" in failure("ERM", "PASC")
    assert "Unknown hyperparameter 'leaning_rate'" in failure("ERM", "PACS", "--hparam", "leaning_rate=1")
    assert "should look like name=value" in failure("ERM", "PACS", "--hparam", "lr")
    assert "'batch_size' should be a whole number" in failure("ERM", "PACS", "--hparam", "batch_size=many")
    assert "Unknown hyperparameter space 'papr'. Did you mean 'paper'?" in failure("ERM", "PACS", "--space", "papr")


def test_a_plugins_algorithm_and_dataset_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (ALGORITHMS, DATASETS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    path = tmp_path / "my_own.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from sandmask.algorithms import ALGORITHMS\n"
        "from sandmask.datasets import DATASETS\n"
        "from sandmask.hparams import Hparam, LogUniform\n"
        "rows = (Hparam('strength', 2.0, LogUniform(10, -1, 1)),)\n"
        "ALGORITHMS.register(replace(ALGORITHMS['ERM'], name='Mine', hparams=rows))\n"
        "DATASETS.register(replace(DATASETS['PACS'], name='MySet'))\n"
    )
    values = configuration("Mine", "MySet", "--plugin", str(path))
    assert values == {**configuration("ERM", "PACS"), "strength": 2.0}
