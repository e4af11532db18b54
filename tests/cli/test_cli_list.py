import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sandmask.algorithms import ALGORITHMS
from sandmask.cli._app import app
from sandmask.datasets import DATASETS
from sandmask.networks import NETWORKS
from sandmask.records import MEASURES
from sandmask.selection import RULES

runner = CliRunner()
WIDE = {"COLUMNS": "250"}
PLUGIN = """
from dataclasses import replace
from sandmask.algorithms import ALGORITHMS
from sandmask.datasets import DATASETS
from sandmask.records import MEASURES

ALGORITHMS.register(replace(ALGORITHMS["ERM"], name="Mine", summary="My own method"))
DATASETS.register(replace(DATASETS["Spirals"], name="MySet"))
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with an algorithm and a dataset of a user's own; the registries forget them after the test."""
    for registry in (ALGORITHMS, DATASETS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    path = tmp_path / "my_method.py"
    path.write_text(PLUGIN)
    return str(path)


def test_json_holds_every_entry_of_the_registries() -> None:
    for kind, registry in (("algorithms", ALGORITHMS), ("datasets", DATASETS), ("rules", RULES), ("metrics", MEASURES)):
        result = runner.invoke(app, ["list", kind, "--json"])
        assert result.exit_code == 0, result.output
        rows = json.loads(result.stdout)
        assert [row["name"] for row in rows] == list(registry)
        assert all(isinstance(row, dict) for row in rows)


def test_algorithms_are_described() -> None:
    rows = {row["name"]: row for row in json.loads(runner.invoke(app, ["list", "algorithms", "--json"]).stdout)}
    assert rows["ANDMask"]["hparams"] == ["tau", "rescale"]
    assert rows["ERM"]["hparams"] == []
    assert all(row["summary"] and row["paper"] for row in rows.values())
    assert "build" not in rows["ERM"]


def test_datasets_are_described() -> None:
    rows = {row["name"]: row for row in json.loads(runner.invoke(app, ["list", "datasets", "--json"]).stdout)}
    assert rows["ColoredMNIST"]["environments"] == ["+90%", "+80%", "-90%"]
    assert rows["ColoredMNIST"]["scope"] == "small-image"
    assert rows["Spirals"]["steps"] == 5001
    assert rows["PACS"]["input_shape"] == [3, 224, 224]
    assert "load" not in rows["Spirals"]


@pytest.mark.parametrize("kind", ["algorithms", "datasets", "rules", "metrics", "networks"])
def test_tables_name_everything(kind: str) -> None:
    names = [row["name"] for row in json.loads(runner.invoke(app, ["list", kind, "--json"]).stdout)]
    table = runner.invoke(app, ["list", kind], env=WIDE)
    assert table.exit_code == 0
    assert names
    assert all(name in table.stdout for name in names)


def test_networks_are_the_registered_ones_and_the_datasets_defaults() -> None:
    rows = json.loads(runner.invoke(app, ["list", "networks", "--json"]).stdout)
    assert {row["name"] for row in rows} == {*NETWORKS, *(entry.network for entry in DATASETS.values())}
    assert "Spirals" in next(row["default of"] for row in rows if row["name"] == "mlp")
    assert "--search" in runner.invoke(app, ["list", "networks"]).stdout


def test_networks_can_be_searched_in_timm() -> None:
    rows = json.loads(runner.invoke(app, ["list", "networks", "--search", "resnet50.tv*", "--json"]).stdout)
    assert {"name": "resnet50.tv_in1k", "default of": []} in rows
    result = runner.invoke(app, ["list", "networks", "--search", "no_such_net*"])
    assert result.exit_code == 2
    assert "No networks match 'no_such_net*'" in result.stderr


def test_what_is_registered_can_be_searched() -> None:
    rows = json.loads(runner.invoke(app, ["list", "algorithms", "--search", "sandmask*", "--json"]).stdout)
    assert {row["name"] for row in rows} == {name for name in ALGORITHMS if name.startswith("SANDMask")}
    result = runner.invoke(app, ["list", "datasets", "--search", "nothing"])
    assert (result.exit_code, "No datasets match 'nothing'" in result.stderr) == (2, True)


def test_a_plugin_adds_its_own(plugin: str) -> None:
    for kind, name in (("algorithms", "Mine"), ("datasets", "MySet")):
        result = runner.invoke(app, ["list", kind, "--plugin", plugin], env=WIDE)
        assert name in result.stdout


def test_algorithms_of_a_plugin_are_listed_in_their_alphabetical_place(plugin: str) -> None:
    listed = json.loads(runner.invoke(app, ["list", "algorithms", "--plugin", plugin, "--json"]).stdout)
    names = [row["name"] for row in listed]
    assert names == sorted(names, key=str.casefold)
    assert 0 < names.index("Mine") < len(names) - 1


def test_mistakes_are_one_line() -> None:
    result = runner.invoke(app, ["list", "algorithm"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: Cannot list 'algorithm'. Did you mean 'algorithms'?")
    result = runner.invoke(app, ["list", "algorithms", "--plugin", "nowhere.py"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: There is no plugin file nowhere.py.")
