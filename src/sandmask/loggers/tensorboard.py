"""Log the evaluations of runs to event files of TensorBoard."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sandmask.diagnostics import open_tensorboard
from sandmask.loggers._base import LOGGERS, LoggerEntry
from sandmask.records import RunSpec, Status


class TensorBoardLogger:
    """A logger that writes scalars to a folder. Values that an earlier attempt wrote there are no longer shown.

    :param target: folder for event files. Each run of a sweep has its own folder inside it.
    :param spec: spec of the run.
    :param shared: whether runs of a sweep share the folder.
    """

    def __init__(self, target: str, spec: RunSpec, shared: bool) -> None:
        folder = Path(target) / spec.folder_name if shared else Path(target)
        self._writer = open_tensorboard(folder, purge_step=0)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write one evaluation."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: Status, files: Sequence[Path]) -> None:  # noqa: ARG002 - TensorBoard has neither
        """Flush and close the writer."""
        self._writer.close()


LOGGERS.register(
    LoggerEntry(
        name="tensorboard",
        summary="event files in the folder TARGET",
        open=TensorBoardLogger,
        package="tensorboard",
        extra="tensorboard",
        target="a folder",
        needs_target=True,
        is_path=True,
    )
)
