"""A search: Optuna proposes, stacks train, hopeless runs stop; the same after any interruption."""

import shutil
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sandmask.api._sweep_arguments import choose_workers
from sandmask.datasets import load_dataset
from sandmask.errors import SandmaskError
from sandmask.hparams import Choice, Constant, Hparam, IntLogUniform, IntUniform, LogUniform, Uniform
from sandmask.records import RunRecord, read_runs
from sandmask.records._archive import write_archive
from sandmask.records.testing import assert_same_runs
from sandmask.reports import build_report
from sandmask.selection import method_names
from sandmask.sweeps import JobOptions, Search, SweepFolder, SweepSpec, expand, normalized, run_sweep, sweep_status
from sandmask.sweeps import _job as job_module
from sandmask.sweeps import _optuna as optuna_module
from sandmask.sweeps._expand import search_ranges
from sandmask.sweeps._optuna import distribution
from sandmask.sweeps._search import _contains
from sandmask.sweeps.executors import InlineExecutor
from sandmask.training import Progress, train_stack

Make = Callable[..., SweepSpec]
SIZES = {"mlp_width": 8, "batch_size": 8}
SEARCH = {"search": "optuna", "algorithms": ("ERM",), "test_envs": ("0",), "hparams": SIZES}


def go(folder: SweepFolder, sweep: SweepSpec, notice: Callable[[str], object] = print) -> dict[int, RunRecord]:
    folder.accept(sweep)
    options = JobOptions(str(folder.path), device="cpu", pruner=sweep.pruner)
    expansion = expand(sweep)
    search = Search(folder, sweep, expansion, notice)
    run_sweep(folder, expansion, options, InlineExecutor, lambda _: 100, search=search)
    status = sweep_status(folder, search.runs())
    assert status.done == status.planned == len(expansion.runs)
    return records(folder)


def records(folder: SweepFolder) -> dict[int, RunRecord]:
    return {run.spec.hparams_seed: run for run in read_runs(folder.path)}


@pytest.fixture(scope="module")
def sweep(small_sweep: Make) -> SweepSpec:
    """With enough evaluations and proposals that the median stops some of the runs."""
    return small_sweep(**SEARCH, n_hparams=12, steps=16)


@pytest.fixture(scope="module")
def searched(sweep: SweepSpec, tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    """The folder of that search; not to be changed."""
    folder = SweepFolder(tmp_path_factory.mktemp("searched") / "sweep")
    go(folder, sweep)
    return folder


@pytest.mark.parametrize(
    ("draw", "default"),
    [
        (Uniform(-1, 1), 0.0),
        (LogUniform(10, -5, -3.5), 1e-4),
        (IntUniform(1, 4), 2),
        (IntLogUniform(2, 3, 5.5), 8),
        (Choice(0.0, 0.1, 0.5), 0.1),
    ],
)
def test_a_distribution_is_searched_where_it_is_drawn(draw: Any, default: float) -> None:
    kind: Any = distribution(Hparam("x", default, draw))
    random = np.random.RandomState(0)
    drawn = [draw.draw(random) for _ in range(2000)]
    assert all(_contains(kind, value) for value in drawn)
    ends = (min(kind.choices), max(kind.choices)) if hasattr(kind, "choices") else (kind.low, kind.high)
    assert ends == pytest.approx((min(drawn), max(drawn)), rel=0.01)
    assert getattr(kind, "log", False) == isinstance(draw, LogUniform)
    assert distribution(Hparam("x", default, Constant(default))) is None


def test_a_search_has_its_number_of_runs_and_is_a_method_of_its_own(searched: SweepFolder, sweep: SweepSpec) -> None:
    runs = records(searched)
    assert sorted(runs) == list(range(12))
    ranges = search_ranges(sweep, "DebugVector", "ERM")
    assert "mlp_width" not in ranges  # set by hand
    for run in runs.values():
        assert run.spec.hparams["mlp_width"] == 8
        assert all(_contains(kind, run.spec.hparams[name]) for name, kind in ranges.items())
    assert runs[0].spec.hparams == expand(replace(sweep, search="none")).runs[0].hparams  # the defaults
    assert len({run.spec.hparams["lr"] for run in runs.values()}) == 12
    drawn = [replace(runs[n], spec=replace(runs[n].spec, options={})) for n in range(2)]
    both = [*runs.values(), *drawn]
    assert set(method_names(both).values()) == {"ERM", "ERM (searched, 12 proposals)"}
    assert all(cell.complete for cell in build_report(both).rules[0].datasets["DebugVector"].cells.values())


def test_pruned_runs_are_the_beginnings_of_whole_ones(searched: SweepFolder, tmp_path: Path) -> None:
    runs = list(records(searched).values())
    ended = [run.status for run in runs]
    assert ended.count("pruned") >= 2
    assert ended.count("done") >= 5  # the median has to be one of some
    dataset = load_dataset("DebugVector")
    whole = train_stack([run.spec for run in runs], dataset, torch.device("cpu"), tmp_path / "checkpoint")
    for run, alone in zip(runs, whole, strict=True):
        kept = len(run.steps)
        assert run.status == "pruned" or kept == len(alone.steps)
        assert run.steps.tolist() == alone.steps[:kept].tolist()
        assert np.array_equal(run.accuracy_out, alone.accuracy_out[:kept])
    assert not list(searched.stacks.glob("*.checkpoint.safetensors"))


def test_an_interrupted_search_ends_as_if_it_had_not_been(
    folder: SweepFolder, searched: SweepFolder, sweep: SweepSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = iter([4, 9, None, 14])  # of the stacks that begin one after the other

    def stopped(specs: Any, *args: Any, on_progress: Callable[[Progress], None], **options: Any) -> list[RunRecord]:
        stop = next(stops, None)

        def watching(progress: Progress) -> None:
            on_progress(progress)
            if stop is not None and progress.done > stop:
                raise KeyboardInterrupt

        return train_stack(specs, *args, on_progress=watching, **options)

    monkeypatch.setattr(job_module, "train_stack", stopped)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            go(folder, sweep)
    with folder.journal.open("ab") as journal:
        journal.write(b'{"op_code": 4, "wor')  # a kill in the middle of a line
    assert_same_runs(go(folder, sweep).values(), read_runs(searched.path))


@pytest.mark.parametrize("place", [9, -1])
def test_a_damaged_journal_is_made_again_from_the_records(
    folder: SweepFolder, searched: SweepFolder, sweep: SweepSpec, place: int
) -> None:
    shutil.copytree(searched.path, folder.path)
    content = folder.journal.read_bytes().splitlines(keepends=True)
    content[place] = b"\x00damage\n"
    folder.journal.write_bytes(b"".join(content))
    longer = replace(sweep, n_hparams=14)
    with pytest.raises(SandmaskError, match=r"damaged.*Rerun"):
        Search(folder, longer, expand(longer))
    said: list[str] = []
    runs = go(folder, longer, said.append)
    assert "damaged" in said[0]
    assert sorted(runs) == list(range(14))
    assert_same_runs((runs[number] for number in range(12)), read_runs(searched.path))


def test_runs_whose_records_were_lost_are_trained_again(
    folder: SweepFolder, searched: SweepFolder, sweep: SweepSpec
) -> None:
    shutil.copytree(searched.path, folder.path)
    for archive in folder.stacks.glob("*.records.parquet"):
        archive.unlink()
    assert_same_runs(go(folder, sweep).values(), read_runs(searched.path))


def test_pruned_runs_whose_records_were_lost_are_trained_up_to_their_last_evaluation(
    folder: SweepFolder, searched: SweepFolder, sweep: SweepSpec
) -> None:
    shutil.copytree(searched.path, folder.path)
    for archive in folder.stacks.glob("*.records.parquet"):
        if "pruned" in {run.status for run in read_runs(archive)}:
            archive.unlink()
    assert len(records(folder)) < 12
    assert_same_runs(go(folder, sweep).values(), read_runs(searched.path))


def test_records_of_another_search_below_the_folder_change_nothing(
    folder: SweepFolder, searched: SweepFolder, sweep: SweepSpec
) -> None:
    """Their runs have the same draws, and another network."""
    folder.stacks.mkdir(parents=True)
    runs = list(read_runs(searched.path))
    others = [replace(run, spec=replace(run.spec, hparams={**run.spec.hparams, "mlp_width": 4})) for run in runs]
    write_archive(others, folder.path / "stacks.old.records.parquet")
    go(folder, sweep)
    assert_same_runs(read_runs(folder.stacks), runs)


def test_runs_without_a_journal_and_a_record_are_proposed_again(
    folder: SweepFolder, searched: SweepFolder, sweep: SweepSpec
) -> None:
    shutil.copytree(searched.path, folder.path)
    folder.journal.unlink()
    (lost,) = (
        file
        for file in folder.stacks.glob("*.records.parquet")
        if {3, 4, 5} == {run.spec.hparams_seed for run in read_runs(file)}
    )
    lost.unlink()
    found = go(folder, sweep)
    assert sorted(found) == list(range(12))
    assert_same_runs(
        (run for run in found.values() if run.spec.hparams_seed not in {3, 4, 5}),
        (run for number, run in records(searched).items() if number not in {3, 4, 5}),
    )


def test_a_fifth_of_the_runs_is_proposed_at_a_time_and_others_in_place_of_failed_ones(
    folder: SweepFolder, sweep: SweepSpec
) -> None:
    folder.stacks.mkdir(parents=True)
    search = Search(folder, sweep, expand(sweep))
    first = search.propose()
    assert len(first) == search.at_a_time == 3
    assert search.propose() == first
    more = search.propose({first[1].id})
    assert more[:3] == first
    assert len(more) == 4
    assert search.runs()[:4] == tuple(more)
    assert Search(folder, sweep, expand(sweep)).runs() == search.runs()


def test_a_search_never_sees_the_held_out_environment(
    folder: SweepFolder, searched: SweepFolder, sweep: SweepSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its labels are turned around, which changes no proposal and no pruning."""
    load = job_module.planned_dataset

    def adversarial(*args: Any) -> Any:
        dataset: Any = copy(load(*args))
        held_out = torch.arange(len(dataset.labels)) < dataset.bounds[1]
        dataset.labels = torch.where(held_out, 1 - dataset.labels, dataset.labels)
        return dataset

    monkeypatch.setattr(job_module, "planned_dataset", adversarial)
    fooled = go(folder, sweep)
    for number, run in records(searched).items():
        other = fooled[number]
        assert other.spec == run.spec
        assert (other.status, other.steps.tolist()) == (run.status, run.steps.tolist())
        assert np.allclose(other.accuracy_out[:, 0], 1 - run.accuracy_out[:, 0])


def test_what_a_search_cannot_do_is_refused_before_anything_is_written(
    folder: SweepFolder, small_sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(SandmaskError, match=match):
            expand(small_sweep(**{**SEARCH, **changes}))

    refused("Unknown sampler 'tpee'.*tpe", sampler="tpee")
    refused("pruner should be one of", pruner="mean")
    refused("for --search optuna", search="none", pruner="none")
    refused("leave-one-domain-out", selection=("leave-one-domain-out",))
    refused("bruteforce.*cannot search", sampler="BruteForceSampler")
    refused("nothing to search", hparams=dict.fromkeys(("lr", "weight_decay"), 1e-3))
    with pytest.raises(SandmaskError, match="--executor local or slurm"):
        choose_workers(folder, small_sweep(**SEARCH), executor="ray", device="cpu", workers=1)
    monkeypatch.setattr(optuna_module, "find_spec", lambda _: None)
    refused(r"pip install 'sandmask\[optuna\]'")
    assert not folder.path.exists()
    assert normalized(small_sweep()).search == "none"  # which needs no Optuna
