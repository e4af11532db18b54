"""Log the evaluations of runs to Weights & Biases. `WANDB_MODE=offline` needs no account and no network."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sandmask.loggers._base import LOGGERS, LoggerEntry
from sandmask.records import RunSpec, Status


class WandbLogger:
    """A logger that writes to a run of a project. It has the id of our run, so a resumed run continues it.

    The records and models of a finished run are stored as an artifact.

    :param target: project; "sandmask" if empty.
    :param spec: spec of the run, which becomes the config.
    :param shared: whether the run belongs to a sweep, whose runs are grouped by dataset and algorithm.
    """

    def __init__(self, target: str, spec: RunSpec, shared: bool) -> None:
        import wandb

        self._spec = spec
        self._run = wandb.init(
            project=target or "sandmask",
            id=spec.id,
            name=spec.folder_name,
            group=f"{spec.dataset} {spec.algorithm}" if shared else None,
            config=spec.to_json(),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Log one evaluation. Steps that the run already has are ignored by Weights & Biases."""
        self._run.log(dict(values), step=step)

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Store the files as an artifact and close the run. A run that diverged is marked as failed."""
        import wandb

        if files:
            artifact = wandb.Artifact(f"run-{self._spec.id}", type="run")
            for file in files:
                artifact.add_file(str(file))
            self._run.log_artifact(artifact)
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "diverged" else 0)


LOGGERS.register(
    LoggerEntry(
        name="wandb",
        summary="Weights & Biases, in the project TARGET; WANDB_MODE=offline needs no account",
        open=WandbLogger,
        package="wandb",
        extra="wandb",
        target="a project",
    )
)
