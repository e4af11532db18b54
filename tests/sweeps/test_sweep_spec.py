"""What is asked for: fields, files, and what may be asked of a folder that holds a sweep."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmask.errors import SandmaskError
from sandmask.sweeps import SweepFolder, SweepSpec, read_sweep, refused_changes, to_toml, write_sweep

Make = Callable[..., SweepSpec]
words = st.lists(st.text(min_size=1).filter(lambda text: text != "all"), min_size=1, max_size=3, unique=True).map(tuple)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 5)


@given(
    datasets=words,
    test_envs=words | st.just(("all",)),
    steps=st.none() | st.integers(1, 9),
    weights=st.none() | st.text(),
    hparams=st.dictionaries(st.text(min_size=1), numbers, max_size=3),
)
def test_a_file_reads_as_what_was_written(tmp_path_factory: pytest.TempPathFactory, **fields: Any) -> None:
    path = tmp_path_factory.mktemp("toml") / "sweep.toml"
    sweep = SweepSpec(algorithms=("ERM",), **fields)
    write_sweep(sweep, path)
    assert SweepSpec(**read_sweep(path)) == sweep


def test_a_file_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text('datasets = "Spirals"\nalgorithms = ["ERM"]\ntest_envs = [0, 3]\n\n[hparams]\nlr = 1e-3\n')
    sweep = SweepSpec(**read_sweep(path))
    assert sweep.datasets == ("Spirals",)
    assert sweep.test_envs == ("0", "3")
    assert sweep.hparams == {"lr": 1e-3}
    assert (sweep.n_hparams, sweep.n_trials) == (20, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm = ['ERM']", "unknown key 'algorithm'. Did you mean 'algorithms'?"),
        ("n_trials = 'three'", "n_trials should be a whole number. Found 'three'"),
        ("steps = true", "steps should be a whole number"),
        ("datasets = [1.5]", "datasets should be a list of names"),
        ("space = 3", "space should be a text in quotes"),
        ("hparams = 3", "[hparams] should be a table"),
        ("datasets = [", "is not valid TOML"),
        ("datasets = " + "[" * 100_000, "is not valid TOML: its values are nested too deeply"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    with pytest.raises(SandmaskError) as error:
        read_sweep(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithms": ()}, "at least one entry in algorithms"),
        ({"datasets": ("A", "A")}, "not contain duplicates"),
        ({"n_hparams": 0}, "n_hparams should be at least 1"),
        ({"seed": -1}, "seed should be from 0 to"),
        ({"test_envs": ("all", "0")}, "not both"),
    ],
)
def test_a_sweep_that_makes_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SandmaskError, match=message):
        SweepSpec(**{"datasets": ("A",), "algorithms": ("B",), **fields})


def test_more_of_the_same_extends_a_folder(folder: SweepFolder, small_sweep: Make) -> None:
    sweep = small_sweep(test_envs=("a",))
    folder.accept(sweep)
    folder.accept(sweep)
    more = small_sweep(n_hparams=5, n_trials=2, algorithms=("IRM", "ERM", "SANDMask"), test_envs=("a", "b"))
    folder.accept(more)
    assert folder.read_spec() == more
    folder.accept(replace(more, test_envs=("all",), selection=("training-domain", "oracle", "leave-one-domain-out")))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_hparams": 1}, "n_hparams is 2 there, but 1 was requested"),
        ({"algorithms": ("ERM",)}, "algorithms is ERM,SANDMask there, but ERM was requested"),
        ({"test_envs": ("a",)}, "test_envs is all there, but a was requested"),
        ({"steps": None}, "steps is 7 there, but the default was requested"),
        ({"hparams": {}}, "hparams is mlp_width=8"),
        ({"metrics": ("f1",)}, "metrics is nothing there, but f1 was requested"),
    ],
)
def test_less_or_something_else_is_refused(
    folder: SweepFolder, small_sweep: Make, changes: dict[str, Any], reason: str
) -> None:
    sweep = small_sweep()
    folder.accept(sweep)
    with pytest.raises(SandmaskError, match="holds another sweep") as error:
        folder.accept(small_sweep(**changes))
    assert reason in str(error.value)
    assert folder.read_spec() == sweep
    assert refused_changes(sweep, sweep) == []


def test_the_text_is_readable(small_sweep: Make) -> None:
    assert to_toml(small_sweep()).startswith('datasets = ["DebugVector"]\nalgorithms = ["ERM", "SANDMask"]\n')


@pytest.mark.parametrize("unknown", [{"algorithms": ("ERM", "Mine")}, {"datasets": ("Mine",)}])
def test_a_sweep_of_a_plugins_names_asks_for_the_plugin(
    folder: SweepFolder, small_sweep: Make, unknown: dict[str, Any]
) -> None:
    write_sweep(replace(small_sweep(), **unknown), folder.request)
    with pytest.raises(SandmaskError, match=r"sweep.toml: Unknown \w+ 'Mine'.* --plugin FILE"):
        folder.read_spec()


def test_a_folder_in_place_of_a_sweep_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match="cannot be read: Is a directory"):
        read_sweep(tmp_path)
