"""Loggers, which send the evaluations of runs to TensorBoard, Weights & Biases, MLflow or your own code.

A logger is given as text, `NAME` or `NAME:TARGET`:

    sandmask.train("Spirals", "ANDMask", 0, log=["tensorboard:logs", "wandb:my-project", "mlflow:mlruns"])

Each run becomes a run of the logger, with the spec as parameters and every evaluation as metrics. If the logger has
artifacts, the records and the model of `sandmask.train` are stored there. A logger that fails prints one warning and
never stops a run.

Your own logger is a class with the two methods of `RunLogger`. Pass a function that opens it to `sandmask.train`, or
register it under a name in a plugin, which also works in sweeps:

    from sandmask.loggers import LOGGERS, LoggerEntry
    LOGGERS.register(LoggerEntry(name="mine", summary="a line per evaluation", open=open_mine))
"""

from sandmask.loggers import mlflow, tensorboard, wandb  # noqa: F401 - they register themselves
from sandmask.loggers._base import (
    LOGGERS,
    Logger,
    LoggerEntry,
    OpenLogger,
    RunLog,
    RunLogger,
    log_record,
    named_loggers,
    requested_loggers,
)

__all__ = [
    "LOGGERS",
    "Logger",
    "LoggerEntry",
    "OpenLogger",
    "RunLog",
    "RunLogger",
    "log_record",
    "named_loggers",
    "requested_loggers",
]
