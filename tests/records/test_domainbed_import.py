"""A generated DomainBed sweep, imported and reported, against a slow twin of the collector's arithmetic."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sandmask.errors import SandmaskError
from sandmask.records import read_domainbed, read_runs, write_archive
from sandmask.reports import build_report, grids

Records = list[dict[str, Any]]


def sweep(root: Path, *, seed: int, size: int, dataset: str = "VLCS", environments: int = 4) -> None:
    """Folders as DomainBed leaves them. A small `size` of splits makes ties the rule."""
    rng = np.random.default_rng(seed)
    held_out = [[a] for a in range(environments)]
    held_out += [[a, b] for a in range(environments) for b in range(a + 1, environments)]
    for algorithm in ("ERM", "ANDMask", "MyOwn"):
        for trial in range(3):
            for test_envs in held_out:
                for draw in range(3):
                    args = {
                        "algorithm": algorithm, "dataset": dataset, "test_envs": test_envs,
                        "trial_seed": trial,
                        "hparams_seed": draw, "seed": int(rng.integers(2**31)), "steps": None,
                        "checkpoint_freq": None, "holdout_fraction": 0.2, "task": "domain_generalization",
                        "uda_holdout_fraction": 0, "hparams": None, "data_dir": "/data", "output_dir": "x",
                    }  # fmt: skip
                    hparams = {
                        "lr": 0.001 * (draw + 1),
                        "batch_size": 32,
                        "class_balanced": False,
                        "mode": "a",
                    }
                    folder = root / f"{algorithm}-{trial}-{'_'.join(map(str, test_envs))}-{draw}"
                    write_run(folder, args, hparams, rng, size, environments)


def write_run(
    folder: Path,
    args: dict[str, Any],
    hparams: dict[str, Any],
    rng: np.random.Generator,
    size: int,
    count: int,
) -> None:
    folder.mkdir(parents=True)
    with (folder / "results.jsonl").open("w") as file:
        for step in (0, 300, 600, 700):
            record: dict[str, Any] = {"args": args, "hparams": hparams, "step": step, "epoch": step / 10}
            for env in range(count):
                record[f"env{env}_in_acc"] = int(rng.integers(0, size + 1)) / size
                record[f"env{env}_out_acc"] = int(rng.integers(0, size + 1)) / size
            record |= {"loss": float("nan") if step == 600 else rng.random(), "mem_gb": 1.5, "step_time": 0.1}
            file.write(json.dumps(record, sort_keys=True) + "\n")
    (folder / "done").write_text("done")


def raw_records(root: Path) -> Records:
    return [json.loads(line) for file in root.glob("*/results.jsonl") for line in file.read_text().splitlines()]


def training_domain(records: Records, test_env: int) -> list[tuple[float, float]]:
    """(validation, test) for each draw, draws ascending; within a draw the first of the best checkpoints."""
    best: dict[int, tuple[float, float]] = {}
    for record in sorted(records, key=lambda r: r["step"]):
        if record["args"]["test_envs"] != [test_env]:
            continue
        outs = [record[f"env{env}_out_acc"] for env in range(4) if env != test_env]
        offer = (float(np.mean(outs)), record[f"env{test_env}_in_acc"])
        draw = record["args"]["hparams_seed"]
        if draw not in best or offer[0] > best[draw][0]:
            best[draw] = offer
    return [best[draw] for draw in sorted(best)]


def oracle(records: Records, test_env: int) -> list[tuple[float, float]]:
    last = {}
    for record in sorted(records, key=lambda r: r["step"]):
        if record["args"]["test_envs"] == [test_env]:
            last[record["args"]["hparams_seed"]] = record
    return [(last[d][f"env{test_env}_out_acc"], last[d][f"env{test_env}_in_acc"]) for d in sorted(last)]


def leave_one_domain_out(records: Records, test_env: int) -> list[tuple[float, float]]:
    found: defaultdict[tuple[int, int], dict[Any, float]] = defaultdict(dict)
    for record in records:
        key = (record["args"]["hparams_seed"], record["step"])
        if len(record["args"]["test_envs"]) == 1:
            found[key]["test"] = record[f"env{test_env}_in_acc"]
        else:
            other = sum(record["args"]["test_envs"]) - test_env
            found[key][other] = record[f"env{other}_in_acc"]
    best: dict[int, tuple[float, float]] = {}
    for (draw, _), values in sorted(found.items()):
        validation = float(np.sum([values[env] for env in range(4) if env != test_env]) / 3)
        if draw not in best or validation > best[draw][0]:
            best[draw] = (validation, values["test"])
    return [best[draw] for draw in sorted(best)]


COLLECTORS = {
    "training-domain": training_domain,
    "leave-one-domain-out": leave_one_domain_out,
    "oracle": oracle,
}


def collected(records: Records, rule: str) -> dict[str, list[str]]:
    """The collector's row of an algorithm: four environments, their average, the averages table's cell."""
    rows = {}
    for algorithm in sorted({record["args"]["algorithm"] for record in records}):
        chosen: dict[tuple[int, int], float] = {}
        for env in range(4):
            for trial in range(3):
                group = [
                    record
                    for record in records
                    if record["args"]["algorithm"] == algorithm
                    and record["args"]["trial_seed"] == trial
                    and env in record["args"]["test_envs"]
                ]
                ascending = sorted(COLLECTORS[rule](group, env), key=lambda offer: offer[0])
                chosen[env, trial] = ascending[-1][1]
        words, means = [], []
        for env in range(4):
            values = [chosen[env, trial] for trial in range(3)]
            means.append(100 * np.mean(values))
            words.append(printed_as(values))
        words.append(f"{sum(means) / 4:.1f}")
        words.append(printed_as([float(np.mean([chosen[env, t] for env in range(4)])) for t in range(3)]))
        rows[algorithm] = words
    return rows


def printed_as(values: list[float]) -> str:
    mean = 100 * np.mean(values)
    error = 100 * np.std(np.array(values) / np.sqrt(len(values)))
    return f"{mean:.1f} ± {error:.1f}"


@pytest.fixture(scope="module", params=[3, 8, 160])
def both_ways(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Records, Path]:
    """DomainBed's records of a sweep, and the store that the sweep was imported into."""
    root = tmp_path_factory.mktemp("domainbed")
    sweep(root / "sweep", seed=request.param, size=request.param)
    write_archive(read_domainbed(root / "sweep").runs, root / "store" / "sweep.records.parquet")
    return raw_records(root / "sweep"), root / "store"


@pytest.mark.parametrize("rule", list(COLLECTORS))
def test_tables_are_the_collectors(both_ways: tuple[Records, Path], rule: str) -> None:
    records, store = both_ways
    table, averages = grids(build_report(read_runs(store), [rule]), statistics=False)
    expected = collected(records, rule)
    assert table.header == ("Algorithm", "C", "L", "S", "V", "Avg")
    assert [row[0] for row in table.rows] == ["ERM", "ANDMask", "MyOwn"]
    for row, average in zip(table.rows, averages.rows, strict=True):
        assert list(row[1:]) == expected[row[0]][:5]
        assert average[1] == expected[row[0]][5]
    assert table.notes == ()


def one_run(root: Path, name: str = "run", **args: Any) -> Path:
    full = {
        "algorithm": "ERM", "dataset": "Spirals", "test_envs": [2], "trial_seed": 1,
        "hparams_seed": 4, "seed": 9,
        "steps": None, **args,
    }  # fmt: skip
    write_run(root / name, full, {"lr": 0.1, "mode": "a"}, np.random.default_rng(0), 7, 17)
    return root / name


def test_a_run_keeps_everything(tmp_path: Path) -> None:
    folder = one_run(tmp_path, task="domain_adaptation")
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    (run,) = read_domainbed(tmp_path).runs
    assert (run.spec.dataset, run.spec.algorithm, run.spec.test_envs) == ("Spirals", "ERM", (2,))
    assert (run.spec.trial_seed, run.spec.hparams_seed, run.spec.seed) == (1, 4, 9)
    assert (run.spec.steps, run.spec.checkpoint_every, run.spec.space) == (701, 300, "domainbed")
    assert run.spec.options == {"source": "domainbed", "task": "domain_adaptation"}
    assert run.spec.hparams == {"lr": 0.1, "mode": "a"}
    assert run.env_names == tuple(str(env) for env in range(17))
    assert run.steps.tolist() == [0, 300, 600, 700]
    assert run.accuracy_in.tolist() == [[line[f"env{env}_in_acc"] for env in range(17)] for line in lines]
    assert run.accuracy_out.tolist() == [[line[f"env{env}_out_acc"] for env in range(17)] for line in lines]
    assert set(run.metrics) == {"loss", "epoch", "mem_gb", "step_time"}
    assert np.array_equal(run.metrics["loss"], [line["loss"] for line in lines], equal_nan=True)
    assert run.status == "done"  # DomainBed trains on through a NaN, and its collector counts the run
    write_archive([run], tmp_path / "copy.records.parquet")
    (copy,) = read_runs(tmp_path / "copy.records.parquet")
    assert copy.spec.id == run.spec.id


def test_unfinished_runs_are_skipped_or_taken_as_unfinished(tmp_path: Path) -> None:
    one_run(tmp_path, "a")
    (one_run(tmp_path, "b", seed=10) / "done").unlink()
    (one_run(tmp_path, "c", seed=11) / "results.jsonl").write_text("")
    imported = read_domainbed(tmp_path)
    assert len(imported.runs) == 1
    assert [(path.name, why) for path, why in imported.skipped] == [
        ("b", "not finished (no file `done`)"),
        ("c", "no results yet"),
    ]
    assert [run.status for run in read_domainbed(tmp_path, include_incomplete=True).runs] == [
        "done",
        "running",
    ]


def test_a_run_started_again_counts_from_its_last_start(tmp_path: Path) -> None:
    folder = one_run(tmp_path)
    path = folder / "results.jsonl"
    whole = path.read_text()
    first = "".join(whole.splitlines(keepends=True)[:2])
    path.write_text(first + whole + '{"torn": ')
    (run,) = read_domainbed(tmp_path).runs
    assert run.steps.tolist() == [0, 300, 600, 700]


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match="has no DomainBed results"):
        read_domainbed(tmp_path)
    with pytest.raises(SandmaskError, match="has no DomainBed results"):
        read_domainbed(tmp_path / "nowhere")
    path = one_run(tmp_path) / "results.jsonl"
    whole = path.read_text()
    path.write_text(whole + "nonsense\n")
    with pytest.raises(SandmaskError, match=r"results\.jsonl:5 is not a DomainBed record"):
        read_domainbed(tmp_path)
    path.write_text(whole.replace('"env3_out_acc"', '"env3_lost_acc"'))
    with pytest.raises(SandmaskError, match=r"results\.jsonl is not a DomainBed results file .*env3_out_acc"):
        read_domainbed(tmp_path)
    path.write_text(whole)
    one_run(tmp_path, "again")
    with pytest.raises(SandmaskError, match="contain the same run"):
        read_domainbed(tmp_path)


def test_accuracies_that_cannot_be_and_deep_json_name_the_file(tmp_path: Path) -> None:
    path = one_run(tmp_path) / "results.jsonl"
    whole = path.read_text()
    lines = [json.loads(line) for line in whole.splitlines()]
    lines[1]["env0_in_acc"] = 5.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SandmaskError, match=r"results\.jsonl is not .*accuracies should be numbers from 0 to 1"):
        read_domainbed(tmp_path)
    path.write_text(whole + "[" * 100_000 + "\n")
    with pytest.raises(SandmaskError, match=r"results\.jsonl:5 .*nested too deeply"):
        read_domainbed(tmp_path)
