"""Weights & Biases, MLflow and loggers of one's own, with the real packages, offline."""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import sandmask
from sandmask.api import Run
from sandmask.errors import SandmaskError
from sandmask.loggers import LOGGERS, LoggerEntry, RunLogger, log_record
from sandmask.loggers._base import without_single_tensors
from sandmask.loggers.mlflow import EXPERIMENT
from sandmask.records import RunSpec, Status
from sandmask.records.testing import made_up_run

SMALL = {"batch_size": 8, "mlp_width": 16}


class Notes:
    """A logger that remembers; one that is told to fail does so at the second evaluation."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.steps: list[int] = []
        self.names: set[str] = set()
        self.end: tuple[Status, list[str]] | None = None

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        if self.fails and self.steps:
            raise OSError("no route to host")
        self.steps.append(step)
        self.names |= set(values)

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        self.end = status, [file.name for file in files]


def train(out: Path, log: Sequence[object], **options: object) -> Run:
    settings = {"steps": 6, "checkpoint_every": 5, "hparams": SMALL, "progress": False, **options}
    return sandmask.train("DebugVector", "ANDMask", 0, out=out, log=log, **settings)  # type: ignore[arg-type]


def test_a_logger_of_ones_own_receives_every_evaluation_and_the_files(tmp_path: Path) -> None:
    notes = Notes()
    train(tmp_path / "run", [lambda _: notes])
    assert notes.steps == [0, 5]
    assert {"loss", "accuracy/in/c", "accuracy/out/training environments"} <= notes.names
    assert notes.end == ("done", ["records.jsonl", "model.safetensors"])


def test_a_logger_that_fails_is_named_and_the_run_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(_: RunSpec) -> RunLogger:
        raise RuntimeError("no account")

    notes, failing = Notes(), Notes(fails=True)
    run = train(tmp_path / "run", [refuses, lambda _: failing, lambda _: notes])
    alone = train(tmp_path / "alone", [])
    said = capsys.readouterr().err
    assert "no account" in said
    assert said.count("no route to host") == 1
    assert failing.steps == [0]
    assert notes.steps == [0, 5]
    assert (run.folder / "model.safetensors").read_bytes() == (alone.folder / "model.safetensors").read_bytes()


def test_an_unknown_logger_or_one_without_its_target_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match=r"Unknown logger 'wanddb'\. Did you mean 'wandb'"):
        train(tmp_path / "run", ["wanddb"])
    with pytest.raises(SandmaskError, match="tensorboard needs a folder"):
        train(tmp_path / "run", ["tensorboard"])
    with pytest.raises(SandmaskError, match=r"write \['wandb'\]"):
        train(tmp_path / "run", "wandb")
    missing = LoggerEntry("absent", "", lambda *_: Notes(), package="not_installed", extra="absent")
    LOGGERS.register(missing)
    try:
        with pytest.raises(SandmaskError, match=r"pip install 'sandmask\[absent\]'"):
            train(tmp_path / "run", ["absent"])
    finally:
        LOGGERS._entries.popitem()
    assert not (tmp_path / "run").exists()


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = train(tmp_path / "run", ["wandb:trial"])
    (file,) = tmp_path.rglob("*.wandb")
    assert run.spec.id in file.name
    content = file.read_bytes()
    for text in ("accuracy/out/training environments", "mlp_width", "records.jsonl", run.spec.folder_name):
        assert text.encode() in content


@pytest.mark.filterwarnings("ignore")  # MLflow uses deprecated parts of SQLAlchemy
def test_mlflow_in_a_folder_keeps_one_run_when_it_is_resumed(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    train(tmp_path / "run", ["mlflow:" + str(tmp_path / "tracking")], keep_checkpoint=True)
    run = train(tmp_path / "other", ["mlflow:" + str(tmp_path / "tracking")])  # the same spec, so the same run
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'tracking' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(EXPERIMENT)
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.info.status == "FINISHED"
    assert logged.data.params["mlp_width"] == "16"
    assert json.loads(logged.data.params["test_envs"]) == [0]
    history = client.get_metric_history(logged.info.run_id, "accuracy/out/training environments")
    assert [(point.step, point.value) for point in history] == [
        (int(step), pytest.approx(float(run.record.accuracy_out[row, run.record.train_envs].mean())))
        for row, step in enumerate(run.record.steps)
    ]
    assert {file.path for file in client.list_artifacts(logged.info.run_id)} == {"records.jsonl", "model.safetensors"}


def test_mlflow_marks_a_pruned_run_as_killed(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    log_record(made_up_run([[0.5, 0.5]], status="pruned"), [f"mlflow:{tmp_path}"])
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])
    assert found.info.status == "KILLED"


@pytest.mark.parametrize(("wanted", "requests"), [(None, 3), ("1", 2)])
def test_mlflow_does_not_wait_long_for_a_server_that_fails(
    wanted: str | None,
    requests: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("mlflow")
    asked = []

    class Unavailable(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(503)

    name = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.delenv(name, raising=False)
    if wanted is not None:
        monkeypatch.setenv(name, wanted)
    with HTTPServer(("127.0.0.1", 0), Unavailable) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        train(tmp_path, [f"mlflow:http://127.0.0.1:{server.server_port}"])
        server.shutdown()
    assert "warning: the logger mlflow" in capfd.readouterr().err
    assert len(asked) == requests
    assert os.environ.get(name) == wanted


def test_a_sweep_logs_each_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    swept = sandmask.sweep(
        tmp_path / "sweep", "DebugVector", ["ERM", "ANDMask"], test_envs=[0], n_hparams=1, n_trials=1, steps=6,
        hparams=SMALL, log=["tensorboard:" + str(tmp_path / "board")], device="cpu", progress=False,
    )  # fmt: skip
    assert len(list((tmp_path / "board").iterdir())) == 2
    assert not swept.failed
    with pytest.raises(SandmaskError, match="accepts loggers only by name"):
        sandmask.sweep(tmp_path / "sweep", log=[lambda _: Notes()], progress=False)  # type: ignore[list-item]


def test_a_large_network_has_few_tags() -> None:
    tensors = [*(f"block.{n}.weight" for n in range(151)), "all"]
    metrics = {f"mask_density/{name}": 0.5 for name in tensors} | {f"agreement/{name}/3": 0.1 for name in tensors}
    assert set(without_single_tensors({**metrics, "loss": 1.0})) == {"loss", "mask_density/all", "agreement/all/3"}
    few = {f"mask_density/{name}": 0.5 for name in ("a", "b", "all")}
    assert without_single_tensors(few) == few
