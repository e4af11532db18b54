"""`sandmask sweep`: plan, run and watch thousands of runs."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

import sandmask
from sandmask._signals import exit_status
from sandmask._text import counted, in_shell
from sandmask.cli import _completion, _options
from sandmask.cli._console import plain_rows, print_json, print_table
from sandmask.cli._sweep_request import DEFAULT_FOLDER, Folder, plan_json, print_plan, with_request

if TYPE_CHECKING:
    from sandmask.api import Sweep

app = typer.Typer(help="Plan and train many runs, show their progress, and list kept models.", no_args_is_help=True)

Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Stacks that train at the same time. (default: one per GPU; without a GPU, one per core, up to 8)",
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, or several for local workers: cuda:0,cuda:1. (default: all GPUs, or cpu)")
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Only these runs of the sweep, by dataset, algorithm, test-env, draw or trial: trial=1, draw=0,1. The "
        "others are left for later. Repeatable.",
    ),
]
MaxStack = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Largest number of runs in a stack. (default: as memory allows)")
]
Calibrate = Annotated[bool, typer.Option(help="Measure a few steps of each method to estimate time and memory.")]


@app.command()
@with_request
def plan(
    folder: Folder = DEFAULT_FOLDER,
    workers: Workers = None,
    device: Device = None,
    only: Only = None,
    max_stack: MaxStack = None,
    calibrate: Calibrate = True,
    fast: _options.FastOption = True,
    data_dir: _options.DataDirOption = None,
    skip_corrupt: _options.SkipCorruptOption = False,
    allow_missing_classes: _options.MissingClassesOption = False,
    json: _options.JsonOption = False,
    **request: Any,
) -> None:
    """Estimate runs, stacks, time, memory and disk of a sweep, and count the runs that DIR already has.

    Time and memory are extrapolated from a few steps on this machine. Nothing is written.

    [bold]Examples[/bold]

    sandmask sweep plan runs/spirals --datasets Spirals --algorithms ERM,ANDMask --n-hparams 4

    sandmask sweep plan runs/spirals --config sweep.toml --no-calibrate --json
    """
    made = sandmask.plan_sweep(**_arguments(locals()))
    if json:
        print_json(plan_json(made))
    else:
        print_plan(made, folder)


@app.command()
@with_request
def run(
    folder: Folder = DEFAULT_FOLDER,
    executor: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where to train: local, ray or slurm.",
            autocompletion=_completion.words("local", "ray", "slurm"),
        ),
    ] = "local",
    workers: Workers = None,
    device: Device = None,
    mps: Annotated[bool, typer.Option(help="Start NVIDIA MPS if workers share a GPU and MPS is not running.")] = True,
    gpus_per_worker: Annotated[
        float, typer.Option(metavar="N", min=0, help="GPUs per worker, for ray (may be a fraction) and slurm.")
    ] = 0.0,
    cpus_per_worker: Annotated[
        int, typer.Option(metavar="N", min=1, help="CPU cores per worker, for ray and slurm.")
    ] = 1,
    ray_address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster, or auto. (default: start one)")
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Option of sbatch: partition=gpu, time=120 (minutes), ... Repeatable."),
    ] = None,
    only: Only = None,
    max_stack: MaxStack = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Stop after this many seconds, with checkpoints, and start only stacks that are expected to finish by "
            "then.",
        ),
    ] = None,
    calibrate: Calibrate = True,
    fast: _options.FastOption = True,
    compiled: _options.CompileOption = False,
    data_dir: _options.DataDirOption = None,
    skip_corrupt: _options.SkipCorruptOption = False,
    allow_missing_classes: _options.MissingClassesOption = False,
    checkpoint_seconds: _options.CheckpointSecondsOption = 30,
    diagnostics: _options.DiagnosticsOption = False,
    tensorboard: _options.TensorBoardOption = None,
    log: _options.LogOption = None,
    json: _options.JsonOption = False,
    **request: Any,
) -> None:
    """Train the missing runs of a sweep in DIR. Rerun to resume.

    Ctrl-C and SIGTERM save and stop. After a crash, training continues from the last checkpoints (see
    --checkpoint-seconds). Several processes may work on one folder. Requesting more draws, trials, methods, datasets
    or environments extends the sweep.

    [bold]Examples[/bold]

    sandmask sweep run runs/spirals --datasets Spirals --algorithms ERM,IRM,ANDMask,SANDMask

    sandmask sweep run runs/spirals --n-trials 5

    sandmask sweep run runs/spirals --time-limit 3500 --only trial=0

    sandmask sweep run runs/spirals --executor ray --ray-address auto --gpus-per-worker 0.5
    """
    given = _arguments(locals())
    try:
        swept = sandmask.sweep(**given)
    except KeyboardInterrupt as error:
        if not getattr(error, "__notes__", None):  # interrupted before the first run
            raise
        raise typer.Exit(exit_status(error)) from None
    _print(swept, json=json)
    if swept.failed:
        raise typer.Exit(1)


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `sandmask.sweep` or `sandmask.plan_sweep`, from the parameters of a command."""
    own = {**given, **given["request"], "progress": False if given["json"] else "lines"}
    return _options.arguments({name: value for name, value in own.items() if name != "request"})


def _print(swept: "Sweep", *, json: bool) -> None:
    planned, failed = len(swept.runs), dict(swept.failed)
    done = planned - len(failed) - swept.left
    if json:
        counts = {"runs": planned, "done": done, "left": swept.left}
        print_json({"folder": str(swept.folder), **counts, "failed": failed})
    elif swept.left:
        typer.echo(f"{done}/{planned} runs done within the time limit. Rerun the same command to continue.")
    elif not swept.trained and not failed:
        typer.echo(f"Nothing to do: {planned}/{planned} runs done. Tables: sandmask report {in_shell(swept.folder)}")
    elif swept.full_data:
        typer.echo(
            f"{done}/{planned} runs done. With full_data=1 they have no validation examples, so tables also need the "
            "sweep without it. Tables: sandmask report FOLDER, where FOLDER holds both sweeps."
        )
    elif done:
        table = swept.table()
        rows = [(*key, *cells) for key, cells in zip(table.index, table.to_numpy().tolist(), strict=True)]
        title = "Held-out accuracy in percent, mean over environments"
        print_table(title, ("dataset", "algorithm", *table.columns), rows)
        typer.echo(f"{done}/{planned} runs done. Tables: sandmask report {in_shell(swept.folder)}")


@app.command()
def models(
    folder: Folder = DEFAULT_FOLDER, json: _options.JsonOption = False, plugin: _options.PluginOption = None
) -> None:
    """List the models that a sweep kept (--keep-models), for sandmask predict and sandmask export.

    [bold]Examples[/bold]

    sandmask sweep models runs/spirals

    sandmask predict runs/spirals points.csv --run 1a2b3c4d
    """
    from sandmask.api import Sweep

    found = Sweep.read(folder, plugin or ()).models()
    if json:
        print_json(plain_rows(found))
        return
    if found.empty:
        typer.echo(f"{folder} holds no models. Train the sweep with --keep-models best, or last.")
        return
    columns = [str(name) for name in found if name != "file"]
    rows = [tuple(_cell(row[name]) for name in columns) for row in plain_rows(found)]
    print_table(f"{counted(len(rows), 'model')} in {folder}", tuple(columns), rows)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if isinstance(value, float) else str(value)


@app.command()
def status(
    folder: Folder = DEFAULT_FOLDER,
    watch: Annotated[bool, typer.Option("--watch", help="Update until all runs are done, or until Ctrl-C.")] = False,
    json: _options.JsonOption = False,
    plugin: _options.PluginOption = None,
) -> None:
    """Show the progress of a sweep, from any terminal.

    [bold]Examples[/bold]

    sandmask sweep status runs/spirals --watch
    """
    from rich.console import Console
    from rich.live import Live

    from sandmask.api import Sweep
    from sandmask.api._progress import view

    look = Sweep.read(folder, plugin or ()).status
    if json:
        print_json(look().to_json())
    elif watch:
        with Live(auto_refresh=False) as live:
            while (found := look()).done < found.planned:
                live.update(view(found), refresh=True)
                time.sleep(1.0)
            live.update(view(found), refresh=True)
    else:
        Console().print(view(look()))
