"""The interface and the registry of loggers, and `RunLog`, which sends a run to its loggers."""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from sandmask._text import printable, tell
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, RunSpec, Status
from sandmask.registry import Registry


class RunLogger(Protocol):
    """The interface of a logger, which receives one run."""

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Receive one evaluation. A run that is resumed sends its earlier evaluations again.

        :param step: training step.
        :param values: accuracies, losses and other metrics by name.
        """
        ...

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Close the log. This is called once, also for a run that was interrupted.

        :param status: "done", "diverged", "pruned" (by a search), or "running" if the run was interrupted.
        :param files: the records and models of a finished run.
        """
        ...


OpenLogger = Callable[[RunSpec], RunLogger]


@dataclass(frozen=True)
class LoggerEntry:
    """A registered logger.

    :param name: name in `--log NAME:TARGET`.
    :param summary: what it writes to, in a few words.
    :param open: function that opens the log of a run. Its arguments are the target (empty if none was given), the
        spec, and whether the runs of a sweep share the target.
    :param package: the module that has to be installed.
    :param extra: the extra of sandmask that installs this module.
    :param target: what the target is, for messages.
    :param needs_target: whether the target is required.
    :param is_path: whether a target without a scheme ("://") is a path.
    """

    name: str
    summary: str
    open: Callable[[str, RunSpec, bool], RunLogger]
    package: str | None = None
    extra: str | None = None
    target: str = "a target"
    needs_target: bool = False
    is_path: bool = False


LOGGERS: Registry[LoggerEntry] = Registry("logger")


MOST_TENSORS = 20  # for networks with more tensors, only the totals over tensors are logged
_PER_TENSOR = ("mask_density/", "dead_fraction/", "agreement/")

Logger = str | OpenLogger


def requested_loggers(log: Sequence[Logger], tensorboard: str | os.PathLike[str] | None = None) -> tuple[Logger, ...]:
    """Check the names of loggers and that their packages are installed, and make paths absolute.

    :param log: texts such as "wandb:my-project", or functions that open a logger.
    :param tensorboard: folder for one more logger, of TensorBoard.
    """
    if not isinstance(log, Sequence) or isinstance(log, str):
        raise SandmaskError(f"`log` should be a list of loggers. Found {log!r}: write [{log!r}].")
    board = () if tensorboard is None else (f"tensorboard:{os.fspath(tensorboard)}",)
    return tuple(_checked(logger) if isinstance(logger, str) else logger for logger in (*log, *board))


def named_loggers(log: Sequence[Logger], tensorboard: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """Do the same as `requested_loggers` for a sweep, whose workers accept loggers by name only.

    :param log: texts such as "wandb:my-project".
    :param tensorboard: folder for one more logger, of TensorBoard.
    """
    found = requested_loggers(log, tensorboard)
    names = tuple(logger for logger in found if isinstance(logger, str))
    if len(names) < len(found):
        raise SandmaskError(
            "A sweep accepts loggers only by name. Register your own in a plugin: see `sandmask.loggers`."
        )
    return names


def _checked(text: str) -> str:
    name, _, target = text.partition(":")
    entry = LOGGERS[name]
    if entry.package is not None and importlib.util.find_spec(entry.package) is None:
        raise SandmaskError(
            f"Logging to {entry.name} needs the package {entry.package}. "
            f"Install it: pip install 'sandmask[{entry.extra}]'"
        )
    if entry.needs_target and not target:
        raise SandmaskError(f"The logger {entry.name} needs {entry.target}. Write {entry.name}:TARGET.")
    if entry.is_path and target and "://" not in target:
        target = os.path.abspath(target)  # noqa: PTH100 - does not resolve links
    return f"{entry.name}:{target}" if target else entry.name


class RunLog:
    """Send the evaluations of one run to its loggers. Metrics keep their names, and accuracies are named

    - `accuracy/in/<environment>` and `accuracy/out/<environment>`, for all environments,
    - `accuracy/out/training environments`, the mean over the training environments.

    If the network has many tensors, statistics of a mask for each tensor are in the records only. If a logger raises an
    exception, a warning is printed and the logger receives nothing more.

    :param loggers: texts that `requested_loggers` returned, or functions that open a logger.
    :param spec: spec of the run.
    :param environments: names of the environments.
    :param shared: whether the targets are shared by the runs of a sweep.
    """

    def __init__(
        self, loggers: Sequence[Logger], spec: RunSpec, environments: Sequence[str], *, shared: bool = False
    ) -> None:
        self.spec = spec
        self.environments = list(environments)
        self.trained = [e for e in range(len(self.environments)) if e not in spec.test_envs]
        self._open: list[tuple[str, RunLogger]] = []
        for logger in loggers:
            name, _, target = logger.partition(":") if isinstance(logger, str) else (repr(logger), "", "")
            try:
                opened = LOGGERS[name].open(target, spec, shared) if isinstance(logger, str) else logger(spec)
            except Exception as error:  # noqa: BLE001 - whatever a logger raises, the run goes on
                _say(name, error)
            else:
                self._open.append((name, opened))

    def evaluation(
        self, step: int, inside: Sequence[float], outside: Sequence[float], metrics: Mapping[str, float]
    ) -> None:
        """Send one evaluation.

        :param step: training step.
        :param inside: accuracy on the "in" split of each environment.
        :param outside: accuracy on the "out" split of each environment.
        :param metrics: other values by name.
        """
        values = without_single_tensors(metrics)
        for split, accuracies in (("in", inside), ("out", outside)):
            names = (f"accuracy/{split}/{name}" for name in self.environments)
            values |= dict(zip(names, accuracies, strict=True))
        values["accuracy/out/training environments"] = float(np.mean([outside[e] for e in self.trained]))
        self._each(lambda logger: logger.evaluation(step, values))

    def finish(self, status: Status = "running", files: Sequence[Path] = ()) -> None:
        """Close every log. A second call does nothing.

        :param status: as in `RunLogger.finish`.
        :param files: the records and models of a finished run.
        """
        present = [file for file in files if file.exists()]
        self._each(lambda logger: logger.finish(status, present))
        self._open.clear()

    def _each(self, action: Callable[[RunLogger], None]) -> None:
        """Call every logger. A logger that raises an exception is not called again."""
        working = []
        for name, logger in self._open:
            try:
                action(logger)
            except Exception as error:  # noqa: BLE001 - whatever a logger raises, the run goes on
                _say(name, error)
            else:
                working.append((name, logger))
        self._open = working

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


def _say(name: str, error: Exception) -> None:
    reason = " ".join(str(error).split()) or type(error).__name__
    tell(printable(f"warning: the logger {name} failed and is not used for the rest of this run: {reason}"))


def without_single_tensors(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out the statistics of a mask for each tensor if the network has more than `MOST_TENSORS` tensors.

    :param metrics: values by name.
    """
    n_tensors = sum(name.startswith("mask_density/") for name in metrics) - 1  # one of them is "all"
    if n_tensors <= MOST_TENSORS:
        return dict(metrics)
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(_PER_TENSOR) or name.split("/")[1] == "all"
    }


def log_record(record: RunRecord, loggers: Sequence[Logger]) -> None:
    """Log a whole run after it has trained in a stack, without files.

    :param record: record of the run.
    :param loggers: texts that `named_loggers` returned.
    """
    with RunLog(loggers, record.spec, record.env_names, shared=True) as log:
        for row, step in enumerate(record.steps):
            metrics = {name: float(curve[row]) for name, curve in record.metrics.items()}
            log.evaluation(int(step), record.accuracy_in[row].tolist(), record.accuracy_out[row].tolist(), metrics)
        log.finish(record.status)
