"""`sandmask train`: one run, from a spec to records and a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import sandmask
from sandmask._text import printable, tell
from sandmask._torchrun import is_first
from sandmask.cli import _completion, _options
from sandmask.cli._completion import check_names, put_in_order
from sandmask.cli._console import print_json, print_table
from sandmask.hparams import DEFAULT_SPACE

if TYPE_CHECKING:
    from sandmask.api import Run
    from sandmask.records import RunRecord

DIVERGED = 3  # the exit status of a run whose loss became NaN or infinite


def train(
    dataset: Annotated[
        str,
        typer.Argument(
            help="A dataset, a folder of images (root/domain/class/*.jpg), a manifest (a CSV or Parquet file with the "
            "columns path, class, domain), an .npz file (with the arrays inputs, class, domain), or hf:NAME for a "
            "Hugging Face dataset.",
            autocompletion=_completion.dataset,
        ),
    ],
    algorithm: Annotated[
        str, typer.Argument(help="An algorithm; see: sandmask list algorithms", autocompletion=_completion.algorithm)
    ],
    test_env: Annotated[
        list[str], typer.Option(metavar="E", help="Environment to hold out, as a name or a number. Repeatable.")
    ],
    steps: _options.StepsOption = None,
    checkpoint_every: _options.CheckpointEveryOption = None,
    hparams: _options.HparamOption = None,
    hparams_seed: _options.HparamsSeedOption = 0,
    trial_seed: _options.TrialSeedOption = 0,
    seed: _options.SeedOption = 0,
    space: _options.SpaceOption = DEFAULT_SPACE,
    network: _options.NetworkOption = None,
    weights: _options.WeightsOption = None,
    precision: _options.PrecisionOption = "fp32",
    averages: _options.AverageOption = None,
    metrics: _options.MetricsOption = None,
    train_eval_limit: _options.TrainEvalOption = None,
    shared_init: Annotated[
        bool, typer.Option("--shared-init", help="Use the same initial weights for all runs of a trial.")
    ] = False,
    compiled: _options.CompileOption = False,
    fast: _options.FastOption = True,
    device: _options.DeviceOption = None,
    data_dir: _options.DataDirOption = None,
    skip_corrupt: _options.SkipCorruptOption = False,
    allow_missing_classes: _options.MissingClassesOption = False,
    checkpoint_seconds: _options.CheckpointSecondsOption = 30,
    keep_checkpoint: Annotated[
        bool,
        typer.Option(
            "--keep-checkpoint", help="Keep the last checkpoint, so that the run can be given more --steps later."
        ),
    ] = False,
    diagnostics: _options.DiagnosticsOption = False,
    tensorboard: _options.TensorBoardOption = None,
    log: _options.LogOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. (default: runs/NAME-ID)")] = None,
    json: _options.JsonOption = False,
    plugins: _options.PluginOption = None,
) -> None:
    """Train ALGORITHM on DATASET with one or more environments held out, and print the accuracy on each environment.

    Ctrl-C and SIGTERM save a checkpoint and stop. Rerun the same command to continue; the result is the same as without
    the interruption. The folder of the run holds records.jsonl, which sandmask report reads, and model.safetensors.

    With --keep-checkpoint, a finished run can be given more steps, unless its learning-rate schedule depends on their
    number, as by default on Spirals. Repeat the command with the same --out and a larger --steps. The result is the
    same as if the run had been started with that number of steps.

    The exit status is 0 if the run is done, 3 if it diverged (its loss became NaN or infinite), 2 for a usage
    error, 130 after Ctrl-C and 143 after SIGTERM.

    To train one model in several processes or on several GPUs, use torchrun, as in the last example.

    [bold]Examples[/bold]

    sandmask train Spirals ANDMask --test-env 5

    sandmask train PACS SANDMask --test-env sketch --precision bf16 --average sma

    sandmask train ./my_images ERM --test-env hospital_3 --network resnet18 --weights resnet18.safetensors

    torchrun --standalone --nproc-per-node 4 -m sandmask train PACS SANDMask --test-env sketch
    """
    dataset, algorithm = put_in_order(dataset, algorithm, "`sandmask train` takes the dataset first.")
    given = _options.arguments(locals())
    check_names(dataset, algorithm, plugins)
    run = sandmask.train(**given, progress=False if json else "lines")
    if is_first():
        print_json(_summary(run)) if json else _print(run, whole=train_eval_limit is None)
    if run.record.status == "diverged":
        raise typer.Exit(DIVERGED)


def _summary(run: "Run") -> dict[str, object]:
    record = run.record
    return {
        "run": run.spec.id,
        "folder": str(run.folder),
        "status": record.status,
        "diverged_at": record.diverged_at,
        "spec": run.spec.to_json(),
        "step": int(record.steps[-1]) if len(record.steps) else None,  # None: diverged before the first evaluation
        "accuracy": run.accuracy[["in", "out", "held_out"]].to_dict("index"),
    }


def _print(run: "Run", *, whole: bool) -> None:
    record, spec = run.record, run.spec
    if record.status == "diverged":
        tell(f"Diverged at step {record.diverged_at}: the loss is NaN or infinite. Try a smaller --hparam lr=...")
    rows = [
        (str(name), "held out" if row["held_out"] else "trained on", f"{row['in']:.1%}", f"{row['out']:.1%}")
        for name, row in run.accuracy.to_dict("index").items()
    ]
    if rows:
        title = f"{spec.algorithm} on {spec.dataset}, after step {record.steps[-1]}"
        print_table(title, ("environment", "", *(_split_titles(record) if whole else ("in", "out"))), rows)
    _print_averages(record)
    typer.echo(f"records and model: {printable(str(run.folder))}")


def _split_titles(record: "RunRecord") -> tuple[str, str]:
    """The names of the splits, with their shares of the examples if these are known."""
    if record.sizes is None:
        return "in", "out"
    inside, outside = (sum(sizes) for sizes in record.sizes)
    share = outside / (inside + outside)
    return f"in ({1 - share:.0%})", f"out ({share:.0%})"


def _print_averages(record: "RunRecord") -> None:
    """Print the accuracies of averaged weights."""
    from sandmask.records import split_averages

    for run in split_averages([record]):
        if (average := run.spec.options.get("average")) is not None and len(run.steps):
            held_out = ", ".join(f"{run.env_names[e]} {run.accuracy_in[-1, e]:.1%}" for e in run.spec.test_envs)
            typer.echo(f"weights averaged by {average.upper()}, held out: {printable(held_out)}")
