"""The options that describe a sweep, which `plan` and `run` share, and the printed plan."""

import inspect
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sandmask._text import counted, duration, in_shell
from sandmask.cli import _completion, _options
from sandmask.cli._console import plain_rows, print_table

if TYPE_CHECKING:
    from sandmask.sweeps import Plan, StackEstimate


DEFAULT_FOLDER = Path("runs/sweep")
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The sweep's folder.")]


def _given(
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with these options as keys; options on the command line take precedence."),
    ] = None,
    datasets: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B",
            help="Datasets, or paths of your own data (folder, manifest, .npz), separated by commas.",
            autocompletion=_completion.dataset,
        ),
    ] = None,
    algorithms: Annotated[
        list[str] | None,
        typer.Option(
            metavar="all|A,B",
            help="Algorithms, separated by commas.",
            autocompletion=_completion.algorithm,
        ),
    ] = None,
    test_envs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="all|0,1",
            help="Environments to hold out, one at a time. (default: all; Spirals: 0 to 15, Spawrious: Test)",
        ),
    ] = None,
    n_hparams: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Hyperparameter draws; number 0 is the defaults. (default: 20)"),
    ] = None,
    n_trials: Annotated[int | None, typer.Option(metavar="N", min=1, help="Repetitions. (default: 3)")] = None,
    space: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Hyperparameter ranges: recipe (the default), paper or domainbed."),
    ] = None,
    selection: Annotated[
        list[str] | None,
        typer.Option(
            metavar="all|A,B",
            help="Selection rules; leave-one-domain-out needs more runs. (default: training-domain and oracle)",
            autocompletion=_completion.rule,
        ),
    ] = None,
    steps: _options.StepsOption = None,
    checkpoint_every: _options.CheckpointEveryOption = None,
    hparams: _options.HparamOption = None,
    network: _options.NetworkOption = None,
    weights: _options.WeightsOption = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Compute precision: fp32x3 (default on a GPU), fp32, tf32, bf16 or fp16."),
    ] = None,
    averages: _options.AverageOption = None,
    metrics: _options.MetricsOption = None,
    train_eval_limit: _options.TrainEvalOption = None,
    keep_models: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH",
            help="Keep each run's weights: best (validation accuracy), last or none. (default: none)",
            autocompletion=_completion.words("best", "last", "none"),
        ),
    ] = None,
    shared_init: Annotated[
        bool | None,
        typer.Option("--shared-init", help="Start all runs of a trial from the same weights, which soups need."),
    ] = None,
    first_stage: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With full_data=1 and lr_patience: the sweep without full_data, to repeat its learning-rate drops.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Change the seeds of all runs. (default: 0)")
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="optuna: let Optuna propose hyperparameters instead of drawing them at random.",
            autocompletion=_completion.words("optuna"),
        ),
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(metavar="NAME", help="Sampler of --search: tpe (the default), random, cmaes, gp, ...")
    ] = None,
    pruner: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Pruner of --search, which stops unpromising runs: median (the default), hyperband or none.",
            autocompletion=_completion.words("median", "hyperband", "none"),
        ),
    ] = None,
    plugins: _options.PluginOption = None,
) -> None:
    """The options of a request, as the parameters of a function."""


def with_request(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `**request` of a command by the options of a request."""
    folder, *own, _ = inspect.signature(command).parameters.values()
    parameters = [folder, *inspect.signature(_given).parameters.values(), *own]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


LONGEST = 40  # rows of the table


def size(n_bytes: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "kB", "MB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.0f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} GB"


def print_plan(plan: "Plan", folder: Path) -> None:
    """Print the stacks in the order of training, then time, memory and disk."""
    grouped: defaultdict[tuple[str, ...], list[StackEstimate]] = defaultdict(list)
    for each in plan.stacks:
        first = each.stack.specs[0]
        grouped[first.dataset, first.algorithm, each.shape].append(each)
    rows = []
    for key, stacks in list(grouped.items())[:LONGEST]:
        runs = [len(each.stack.specs) for each in stacks]
        seconds = [each.seconds for each in stacks if each.seconds is not None]
        took = duration(sum(seconds)) if seconds else "-"
        rows.append((*key, str(sum(runs)), str(len(stacks)), took, size(max(each.memory_bytes for each in stacks))))
    if rows:
        print_table(
            "Stacks, in the order of training",
            ("dataset", "algorithm", "shape", "runs", "stacks", "time", "memory of one"),
            rows,
        )
    if len(grouped) > LONGEST:
        typer.echo(f"and {len(grouped) - LONGEST} more shapes (--json lists them all)")
    for note in plan.notes:
        typer.echo(f"note: {note}")
    missing = plan.runs - plan.done
    all_runs, all_stacks = counted(plan.runs, "run"), counted(len(plan.stacks), "stack")
    typer.echo(f"{all_runs}: {plan.done} done, {missing} missing, in {all_stacks}.")
    if missing:
        took = "not measured" if plan.seconds is None else f"about {duration(plan.seconds)}"
        at_once = f", {plan.workers} stacks at a time" if plan.workers > 1 else ""
        typer.echo(f"Time: {took}{at_once}. Memory: {size(plan.memory_bytes)}. Disk: {size(plan.disk_bytes)}.")
    else:
        typer.echo(f"Nothing to do. Tables: sandmask report {in_shell(folder)}")


def plan_json(plan: "Plan") -> dict[str, Any]:
    """The plan as JSON values."""
    stacks = plain_rows(plan.frame())
    for row, each in zip(stacks, plan.stacks, strict=True):
        row["runs"] = [spec.id for spec in each.stack.specs]
        row |= {"memory_bytes": round(each.memory_bytes), "disk_bytes": round(each.disk_bytes)}
    return {
        "runs": plan.runs,
        "done": plan.done,
        "missing": plan.runs - plan.done,
        "seconds": plan.seconds,
        "memory_bytes": round(plan.memory_bytes),
        "disk_bytes": round(plan.disk_bytes),
        "workers": plan.workers,
        "notes": list(plan.notes),
        "stacks": stacks,
    }
