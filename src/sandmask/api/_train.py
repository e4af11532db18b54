"""`sandmask.train`: train one run."""

import html
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sandmask._arguments import Names, PathLike, checked, names_in, paths
from sandmask._signals import sigterm_raises
from sandmask._text import printable, tell
from sandmask.algorithms import ALGORITHMS
from sandmask.api._images import allowances, announce, check_images
from sandmask.api._progress import ShowProgress, TrainingBar, choose_screen
from sandmask.datasets import dataset_entry, double_meaning, load_dataset, resolve_environment
from sandmask.hparams import DEFAULT_SPACE
from sandmask.loggers import Logger, requested_loggers
from sandmask.plugins import load_plugins
from sandmask.records import RunRecord, RunSpec, frame, parse_measures
from sandmask.training import RunFolder, TrainedRun, load_run, make_spec
from sandmask.training.folder import CHECKPOINT, RECORDS
from sandmask.training.loop import CHECKPOINT_SECONDS
from sandmask.training.processes import check_alike, own_device, process_group
from sandmask.training.specs import check_environments, early_end_of, leak_of, short_average_of

if TYPE_CHECKING:
    import pandas as pd
    import torch


@dataclass(frozen=True)
class Run:
    """A trained run: the folder that holds it and its record. A notebook shows its curves and final accuracies."""

    folder: Path
    record: RunRecord

    @property
    def spec(self) -> RunSpec:
        """The spec of the run."""
        return self.record.spec

    @property
    def accuracy(self) -> "pd.DataFrame":
        """The accuracies of the last evaluation: a row for each environment, with the columns held_out, in and out.

        The columns `in` and `out` are the accuracies on the two splits of each environment, by default 80% and 20% of
        its examples. The frame is empty if the run diverged before the first evaluation.
        """
        import pandas as pd

        record = self.record
        names = record.env_names if len(record.steps) else ()
        columns = {
            "held_out": [env in record.spec.test_envs for env in range(len(names))],
            "in": record.accuracy_in[-1] if names else [],
            "out": record.accuracy_out[-1] if names else [],
        }
        return pd.DataFrame(columns, index=pd.Index(names, name="environment"))

    def frame(self) -> "pd.DataFrame":
        """Every evaluation: a row for each step and environment, with the columns of `sandmask.load_records`."""
        return frame([self.record])

    def model(self, device: "str | torch.device" = "cpu") -> TrainedRun:
        """The trained model, ready to predict: the same as `sandmask.load_run(run.folder)`.

        :param device: where to load it.
        """
        return load_run(self.folder, device)

    def __fspath__(self) -> str:
        """The folder, so that a run can be passed where a folder is expected, as in `sandmask.predict(run, files)`."""
        return str(self.folder)

    def __repr__(self) -> str:
        return f"Run({self._title()}, {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        """The curves and the table that a notebook shows."""
        from sandmask.reports.html._curves import curves_svg

        table = self.accuracy.to_html(float_format="{:.1%}".format, border=0)
        return f"<p>{html.escape(printable(self._title()))}</p>{curves_svg(self.record)}{table}"

    def _title(self) -> str:
        record, spec = self.record, self.spec
        what = f"{spec.algorithm} on {spec.dataset}"
        if record.status == "diverged":
            return f"{what}, diverged at step {record.diverged_at}"
        return f"{what}, after step {record.steps[-1]}"


@checked
def train(
    dataset: PathLike,
    algorithm: str,
    test_env: str | int | Sequence[str | int],
    *,
    steps: int | None = None,
    checkpoint_every: int | None = None,
    hparams: Mapping[str, str | float] | None = None,
    hparams_seed: int = 0,
    trial_seed: int = 0,
    seed: int = 0,
    space: str = DEFAULT_SPACE,
    network: str | None = None,
    weights: str | None = None,
    precision: str = "fp32",
    averages: Names = (),
    metrics: Names = (),
    train_eval_limit: int | None = None,
    shared_init: bool = False,
    compiled: bool = False,
    fast: bool = True,
    device: "str | torch.device | None" = None,
    data_dir: PathLike | None = None,
    skip_corrupt: bool = False,
    allow_missing_classes: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    keep_checkpoint: bool = False,
    diagnostics: bool = False,
    tensorboard: PathLike | None = None,
    log: Sequence[Logger] = (),
    out: PathLike | None = None,
    plugins: PathLike | Iterable[PathLike] = (),
    progress: ShowProgress = True,
) -> Run:
    """Train an algorithm on a dataset with one or more environments held out.

    The run can be interrupted (Ctrl-C, a notebook's stop button, SIGTERM): it saves a checkpoint and raises
    `KeyboardInterrupt`. The same call continues it; the result is the same as without the interruption. A finished run
    is read and not trained again.

    In a script that is started with torchrun, the processes train the run together. All of them must call this with the
    same arguments.

        run = sandmask.train("Spirals", "ANDMask", 0, steps=300, hparams={"tau": 0.95})
        run.accuracy              # by environment, after the last step
        run.frame()               # every evaluation

    :param dataset: name of a dataset, a folder of images (root/domain/class/*.jpg), a manifest (CSV or Parquet with the
        columns path, class and domain), or an .npz file with the arrays inputs, class and domain.
    :param algorithm: name of an algorithm.
    :param test_env: environment to hold out, by name or number, or a list of them.
    :param steps: training steps; the dataset's protocol if not given.
    :param checkpoint_every: steps between evaluations; the dataset's protocol if not given.
    :param hparams: values of hyperparameters by name, instead of the drawn ones.
    :param hparams_seed: number of the random draw; 0 means the defaults.
    :param trial_seed: number of the repetition, which decides the draw and the data splits.
    :param seed: seed of weights, minibatches and other randomness.
    :param space: where defaults and draws come from: "recipe", "paper" or "domainbed".
    :param network: "mlp", "mnist-convnet", one of your own or a timm name; the dataset's protocol if not given.
    :param weights: file with pretrained weights of a timm network, or "none"; timm's own weights if not given.
    :param precision: compute precision: "fp32", "fp32x3", "tf32", "bf16" or "fp16".
    :param averages: averages of the weights that are evaluated too: "sma", "ema", "swad".
    :param metrics: metrics beyond accuracy to record: "f1", "ece", "worst-group", "per-class", "confusion", or "all".
    :param train_eval_limit: largest number of examples of each training environment on which accuracies are computed;
        all of them if not given. Validation and held-out examples are always all evaluated.
    :param shared_init: take the initial weights from the trial instead of the seed, as soups require.
    :param compiled: compile the network, for timm networks.
    :param fast: use CUDA graphs on a GPU.
    :param device: "cpu", "cuda", "cuda:1"; a GPU if there is one.
    :param data_dir: folder of the datasets.
    :param skip_corrupt: skip images that cannot be read.
    :param allow_missing_classes: allow image domains that lack some of the classes.
    :param checkpoint_seconds: seconds between checkpoints.
    :param keep_checkpoint: keep the last checkpoint, so that the run can be given more steps later.
    :param diagnostics: also record statistics of the mask and the agreement of held-out gradients.
    :param tensorboard: folder for event files of TensorBoard.
    :param log: loggers that receive every evaluation: "tensorboard:FOLDER", "wandb:PROJECT", "mlflow:FOLDER", one that
        a plugin registers, or a function that opens a `sandmask.loggers.RunLogger`.
    :param out: folder of the run; runs/NAME-ID if not given.
    :param plugins: Python files that register algorithms or datasets.
    :param progress: show a bar in a terminal or a notebook. "lines" also prints a line every ten seconds elsewhere.
    :return: the run, with its record.
    """
    wanted = None if device is None else str(device)
    with sigterm_raises(), process_group(wanted) as ranks:
        screen = choose_screen(progress if ranks.first else False)
        with ranks.together():
            load_plugins(paths(plugins))
            loggers = requested_loggers(log, tensorboard)
            entry = dataset_entry(os.fspath(dataset))
            allowed = allowances(skip_corrupt=skip_corrupt, allow_missing_classes=allow_missing_classes)
            data = load_dataset(entry, data_dir, **allowed)
            test_envs = [test_env] if isinstance(test_env, str | int) else test_env
            spec = make_spec(
                entry,
                algorithm,
                [resolve_environment(data, env) for env in test_envs],
                steps=steps,
                checkpoint_every=checkpoint_every,
                hparams=hparams,
                hparams_seed=hparams_seed,
                trial_seed=trial_seed,
                seed=seed,
                space=space,
                network=network,
                weights=weights,
                precision=precision,
                averages=names_in(averages),
                shared_init=shared_init,
            )
            check_environments(spec, data)
            measures = parse_measures(names_in(metrics))
            folder = RunFolder(Path(out) if out is not None else Path("runs") / spec.folder_name)
            if ranks.first:
                extras = bool(loggers or diagnostics or measures or train_eval_limit)
                for note in filter(None, (double_meaning(data, env) for env in test_envs)):
                    tell(f"note: {printable(note)}")
                _say_what_to_know(folder, spec, extras=extras)
                announce(data, screen)
            if not folder.finished(spec):
                check_images(data, screen, keep=True, ranks=ranks)
        recorded = {"diagnostics": diagnostics, "metrics": measures, "train_eval_limit": train_eval_limit}
        check_alike(ranks, spec, data, **recorded)
        try:
            with TrainingBar(spec, screen) as bar:
                record = folder.train(
                    spec,
                    data,
                    own_device(ranks.size, wanted),
                    weights=weights,
                    compiled=compiled,
                    fast=fast,
                    diagnostics=diagnostics,
                    metrics=measures,
                    train_eval_limit=train_eval_limit,
                    loggers=loggers,
                    on_progress=bar.update,
                    evaluating=bar.evaluating,
                    keep_checkpoint=keep_checkpoint,
                    checkpoint_seconds=checkpoint_seconds,
                    ranks=ranks,
                )
        except KeyboardInterrupt:
            if ranks.first and (folder.path / CHECKPOINT).exists():  # before the first steps, there is nothing to save
                tell(f"Stopped. The run is saved in {folder.path}. Rerun the same command to continue.")
            raise
    return Run(folder.path, record)


def _say_what_to_know(folder: RunFolder, spec: RunSpec, *, extras: bool) -> None:
    """Print warnings about a run, and a note if a finished run is trained again or stays unchanged."""
    cautions = (
        ALGORITHMS[spec.algorithm].caution(spec.hparams),
        early_end_of(spec),
        short_average_of(spec),
        leak_of(spec),
    )
    for caution in cautions:
        if caution is not None:
            tell(f"warning: {caution}")
    if not folder.has_model(spec):
        return
    if not folder.finished(spec):
        tell(f"note: {folder.path / RECORDS} is damaged: lines of this finished run are missing. Training it again.")
    elif extras:
        tell("note: this run is finished and is not changed. To train it again, choose another --out.")
