"""`sandmask sweep` as a user runs it."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sandmask._arguments import names_in
from sandmask.api._sweep_arguments import slurm_parameters
from sandmask.cli._app import app
from sandmask.errors import SandmaskError
from sandmask.records import read_runs
from sandmask.sweeps import SweepFolder, SweepSpec, normalized, read_sweep
from sandmask.sweeps.executors import EXECUTORS, ExecutorOptions

ASKED = (
    "--space",
    "paper",
    "--datasets",
    "debugvector",
    "--algorithms",
    "erm,SANDMask",
    "--n-hparams",
    "2",
    "--n-trials",
    "1",
)
SMALL = ("--steps", "5", "--checkpoint-every", "2", "--hparam", "mlp_width=8", "--hparam", "batch_size=8")
HERE = ("--device", "cpu")


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["sweep", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_a_sweep_without_models_says_how_to_keep_them(tmp_path: Path) -> None:
    SweepFolder(tmp_path).accept(normalized(SweepSpec(("DebugVector",), ("ERM",))))
    said = run("models", tmp_path).stdout
    assert said == f"{tmp_path} holds no models. Train the sweep with --keep-models best, or last.\n"
    assert json.loads(run("models", tmp_path, "--json").stdout) == []


def test_from_plan_to_tables(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    plan = json.loads(run("plan", folder, *ASKED, *SMALL, *HERE, "--json").stdout)
    assert (plan["runs"], plan["done"], plan["missing"]) == (12, 0, 12)
    assert sorted(len(stack["runs"]) for stack in plan["stacks"]) == [3, 3, 3, 3]  # depth differs between draws
    assert not folder.exists()
    assert plan["seconds"] > 0
    assert plan["memory_bytes"] > 0
    result = run("run", folder, *ASKED, *SMALL, *HERE)
    assert "Tables: sandmask report" in result.stdout
    assert "12/12 runs done" in result.stdout
    assert "ERM" in result.stdout
    records = {path: path.stat().st_size for path in folder.rglob("*.records.parquet")}
    assert plan["disk_bytes"] / 3 < sum(records.values()) < plan["disk_bytes"] * 3
    after = json.loads(run("plan", folder, *HERE, "--json", "--no-calibrate").stdout)
    assert (after["missing"], after["stacks"], after["disk_bytes"]) == (0, [], 0)
    assert "Nothing to do" in run("plan", folder, *HERE).stdout
    assert "12/12 runs done" in run("status", folder).stdout
    assert json.loads(run("status", folder, "--json").stdout)["done"] == 12
    report = CliRunner().invoke(app, ["report", str(folder)])
    assert "DebugVector" in report.stdout


def test_the_folder_remembers_and_more_extends_it(tmp_path: Path) -> None:
    run("run", tmp_path, *ASKED, *SMALL, *HERE, "--json")
    result = run("run", tmp_path, "--n-trials", "2", *HERE, "--json")
    assert json.loads(result.stdout)["done"] == 24
    assert not result.stderr
    refused = run("run", tmp_path, "--n-trials", "1", *HERE, code=2)
    assert "n_trials is 2 there, but 1 was requested" in refused.stderr
    assert "n_trials is 2 there" in run("plan", tmp_path, "--n-trials", "1", "--no-calibrate", *HERE).stdout
    assert len(read_runs(tmp_path)) == 24


def test_a_file_says_the_same_as_options(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(
        textwrap.dedent("""
        space = "paper"
        datasets = ["DebugVector"]
        algorithms = ["ERM", "SANDMask"]
        n_hparams = 2
        n_trials = 1
        steps = 5
        checkpoint_every = 2

        [hparams]
        mlp_width = "8"
        batch_size = "8"
        """)
    )
    first = json.loads(run("plan", tmp_path / "a", "--config", config, "--no-calibrate", *HERE, "--json").stdout)
    second = json.loads(run("plan", tmp_path / "b", *ASKED, *SMALL, "--no-calibrate", *HERE, "--json").stdout)
    assert first == second
    assert first["seconds"] is None
    some = run("plan", tmp_path / "a", "--config", config, "--test-envs", "b", "--no-calibrate", *HERE, "--json")
    assert json.loads(some.stdout)["runs"] == 4


def test_the_request_is_written_down(tmp_path: Path) -> None:
    run("run", tmp_path, *ASKED, *SMALL, *HERE, "--test-envs", "b", "--json")
    sweep = SweepSpec(**read_sweep(tmp_path / "sweep.toml"))
    assert sweep.algorithms == ("ERM", "SANDMask")
    assert sweep.test_envs == ("b",)


def test_a_method_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sandmask.algorithms import ALGORITHMS

    monkeypatch.setattr(ALGORITHMS, "_entries", dict(ALGORITHMS._entries))
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from dataclasses import replace\n"
        "from sandmask.algorithms import ALGORITHMS\n"
        "ALGORITHMS.register(replace(ALGORITHMS['ERM'], name='SweptPlugin'))\n"
    )
    asked = ("--datasets", "DebugVector", "--algorithms", "SweptPlugin", "--n-hparams", "1", "--n-trials", "1")
    run("run", tmp_path / "sweep", *asked, *SMALL, "--test-envs", "a", "--plugin", plugin, *HERE, "--workers", "2")
    assert {run.spec.algorithm for run in read_runs(tmp_path / "sweep")} == {"SweptPlugin"}


def test_the_plan_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # or cells may be folded
    result = run("plan", tmp_path, *ASKED, *SMALL, *HERE, "--no-calibrate", "--max-stack", "2")
    assert "batch 8, width 8, depth 3" in result.stdout
    assert "12 runs: 0 done, 12 missing, in 8 stacks." in result.stdout
    assert "Time: not measured." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--algorithms", "ERM"), "name its datasets with --datasets or --config"),
        (("--datasets", "DebugVektor", "--algorithms", "ERM"), "Did you mean 'DebugVector'?"),
        (("--datasets", "DebugVector", "--algorithms", "ERM,SANDMsk"), "Did you mean 'SANDMask'?"),
        (("--datasets", "DebugVector", "--algorithms", "ERM", "--test-envs", "d"), "has no environment 'd'"),
        (("--datasets", "DebugVector", "--algorithms", "ERM", "--selection", "orakle"), "Did you mean 'oracle'?"),
        (("--datasets", "DebugVector", "--algorithms", "ERM", "--hparam", "lrr=1"), "Did you mean 'lr'?"),
        (("--datasets", "DebugVector", "--algorithms", "ERM", "--precision", "fp8"), "Unknown precision 'fp8'"),
        (("--datasets", "DebugVector", "--algorithms", "ERM", "--space", "papper"), "Did you mean 'paper'?"),
        (("--datasets", "DebugVector", "--algorithms", "ERM", "--executor", "rey"), "Did you mean 'ray'?"),
        (("--datasets", "DebugVector", "--algorithms", "ERM", "--slurm", "partition=x"), "needs --executor slurm"),
        (("--config", "nowhere.toml"), "There is no file nowhere.toml"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = run("run", tmp_path / "sweep", *arguments, code=2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "sweep").exists()


def test_status_of_nothing(tmp_path: Path) -> None:
    assert "holds no sweep" in run("status", tmp_path, code=2).stderr


def test_diagnostics_of_every_run(tmp_path: Path) -> None:
    folder, board = tmp_path / "sweep", tmp_path / "board"
    options = ("--n-hparams", "1", "--no-calibrate", "--diagnostics", "--tensorboard", board, "--json")
    run("run", folder, *ASKED, *SMALL, *HERE, *options)
    runs = read_runs(folder)
    assert len(runs) == 6
    for record in runs:
        masked = record.spec.algorithm == "SANDMask"
        assert ("mask_density/all" in record.metrics) == masked
        assert "held_out_coherence" in record.metrics
    names = {f"DebugVector-{record.spec.algorithm}-{record.spec.id}" for record in runs}
    assert {path.parent.name for path in board.rglob("events.out.tfevents.*")} == names
    more = run("run", folder, "--selection", "training-domain,oracle,common-signal", "--n-trials", "2", *HERE)
    assert "common-signal needs runs that were trained with --diagnostics" in more.stderr


def test_options_for_slurm_replace_our_own_and_times_are_read_as_slurm_writes_them(tmp_path: Path) -> None:
    asked = ["time=10", "cpus_per_task=3", "partition=gpu", "mem=16G"]
    expected = {"timeout_min": 10, "cpus_per_task": 3, "slurm_partition": "gpu", "slurm_mem": "16G"}
    assert slurm_parameters(asked) == expected
    assert slurm_parameters({"mem": 16000, "mem_gb": 16}) == {"slurm_mem": 16000, "mem_gb": 16}  # MB, as in sbatch
    with pytest.raises(SandmaskError, match=r"mem=16 is 16 MB in Slurm.* write mem=16G"):
        slurm_parameters(["mem=16"])
    times = {"90": 90, "90:30": 91, "02:00:00": 120, "1-12": 2160, "1-12:30": 2190, "0-0:0:1": 1}
    assert {each: slurm_parameters([f"time={each}"])["timeout_min"] for each in times} == times
    for wrong in ("time=soon", "nodes=two"):
        with pytest.raises(SandmaskError, match=f"{wrong.split('=')[0]}= should be"):
            slurm_parameters([wrong])
    parameters = slurm_parameters(["time=10", "cpus_per_task=1"])
    EXECUTORS["slurm"].build(ExecutorOptions(cluster="local", slurm=parameters, log_folder=str(tmp_path))).shutdown()


def test_a_finished_sweep_is_told_from_its_index_without_reading_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("run", tmp_path, *ASKED, *SMALL, *HERE, "--workers", "1", "--n-hparams", "1")
    monkeypatch.setattr("sandmask.records._archive.read_archive", lambda _: pytest.fail("reads everything"))
    assert "Nothing to do: 6/6 runs done." in run("run", tmp_path, *HERE).stdout


def test_a_folder_with_a_comma_in_its_name_is_one_dataset(tmp_path: Path) -> None:
    (tmp_path / "scans, old").mkdir()
    assert names_in([f"{tmp_path}/scans, old", "PACS,VLCS"]) == (f"{tmp_path}/scans, old", "PACS", "VLCS")
    assert len(names_in(",".join(f"name{n}" for n in range(100)))) == 100  # longer than the name of a file can be
