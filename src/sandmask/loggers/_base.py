"""The interface of a logger, and the registry of loggers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sandmask.records import RunSpec, Status
from sandmask.registry import Registry


class RunLogger(Protocol):
    """Receives one run."""

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Receive one evaluation. A run that is resumed sends its earlier evaluations again.

        :param step: training step.
        :param values: accuracies, losses and other metrics by name.
        """
        ...

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Close the log. Called once, also for a run that was interrupted.

        :param status: "done", "diverged", or "running" if the run was interrupted.
        :param files: the records and models of a finished run.
        """
        ...


OpenLogger = Callable[[RunSpec], RunLogger]


@dataclass(frozen=True)
class LoggerEntry:
    """A logger by its name.

    :param name: name in `--log NAME:TARGET`.
    :param summary: what it writes to, in a few words.
    :param open: opens the log of a run, from the target (empty if none was given), the spec, and whether the target
        is shared by the runs of a sweep.
    :param package: the module that has to be installed.
    :param extra: the extra of sandmask that installs it.
    :param target: what the target is, for messages.
    :param needs_target: whether a target has to be given.
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
