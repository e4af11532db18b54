"""Log the evaluations of runs to MLflow, on a tracking server or in a local folder."""

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sandmask.loggers._base import LOGGERS, LoggerEntry
from sandmask.records import RunSpec, Status

EXPERIMENT = "sandmask"
ID_TAG = "sandmask_id"
_STATUSES = {"done": "FINISHED", "diverged": "FAILED", "running": "KILLED", "pruned": "KILLED"}
_LONGEST = 500  # characters of a parameter
_METRICS_PER_CALL = 1000
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


class MlflowLogger:
    """A logger that writes to a run of the experiment "sandmask". A resumed run continues the run with its id.

    The spec is logged as parameters, and the records and models of a finished run as artifacts.

    :param target: address of a tracking server, or a folder for a database and the artifacts. If empty, MLflow's own
        setting (`MLFLOW_TRACKING_URI`) is used.
    :param spec: spec of the run.
    :param shared: not used: all runs are in one experiment.
    """

    def __init__(self, target: str, spec: RunSpec, shared: bool) -> None:  # noqa: ARG002
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # otherwise it logs the tables of a new database
        address, artifacts = target or None, None
        if target and "://" not in target:
            folder = Path(target)
            folder.mkdir(parents=True, exist_ok=True)
            address, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        self._client = MlflowClient(tracking_uri=address)
        with _few_retries():
            experiment = self._client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            experiment_id = self._client.create_experiment(EXPERIMENT, artifact_location=artifacts)
        else:
            experiment_id = experiment.experiment_id
        self._run = self._find(str(experiment_id), spec)
        self._last = self._last_step()
        params = [Param(_allowed(name), text[:_LONGEST]) for name, text in _parameters(spec)]
        self._client.log_batch(self._run, params=params)

    def _find(self, experiment: str, spec: RunSpec) -> str:
        """Open the run with this spec's id again, or create it."""
        earlier = self._client.search_runs([experiment], f"tags.{ID_TAG} = '{spec.id}'", max_results=1)
        if earlier:
            self._client.update_run(earlier[0].info.run_id, status="RUNNING")
            return str(earlier[0].info.run_id)
        made = self._client.create_run(experiment, run_name=spec.folder_name, tags={ID_TAG: spec.id})
        return str(made.info.run_id)

    def _last_step(self) -> int:
        """Return the last step that the run already has, or -1."""
        names = list(self._client.get_run(self._run).data.metrics)[:1]  # every evaluation has all metrics
        history = [point for name in names for point in self._client.get_metric_history(self._run, name)]
        return max((int(point.step) for point in history), default=-1)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Log one evaluation, unless the run already has it."""
        from mlflow.entities import Metric

        if step <= self._last:
            return
        now = int(1000 * time.time())
        metrics = [Metric(_allowed(name), value, now, step) for name, value in values.items()]
        for begin in range(0, len(metrics), _METRICS_PER_CALL):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + _METRICS_PER_CALL])

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Store the files as artifacts and end the run."""
        for file in files:
            self._client.log_artifact(self._run, str(file))
        self._client.set_terminated(self._run, _STATUSES[status])


@contextmanager
def _few_retries() -> Iterator[None]:
    """Let MLflow try a request three times, unless the user has set a number. By default, it tries for four minutes.

    This is for the first request, which fails if the address is wrong or the server is not running.
    """
    if _RETRIES in os.environ:
        yield
        return
    os.environ[_RETRIES] = "2"
    try:
        yield
    finally:
        del os.environ[_RETRIES]


def _parameters(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the spec as text. Hyperparameters and options keep their own names."""
    for name, value in spec.to_json().items():
        if isinstance(value, dict):
            yield from ((key, str(each)) for key, each in value.items())
        else:
            yield name, str(value)


def _allowed(name: str) -> str:
    """Replace the characters that MLflow does not accept in names."""
    return re.sub(r"[^\w\-. /:]", "_", name)


LOGGERS.register(
    LoggerEntry(
        name="mlflow",
        summary="MLflow, at the tracking address or in the folder TARGET",
        open=MlflowLogger,
        package="mlflow",
        extra="mlflow",
        target="a tracking address or a folder",
        is_path=True,
    )
)
