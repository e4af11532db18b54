"""`sandmask sweep`: plan, run and watch thousands of runs."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sandmask._signals import exit_status, sigterm_raises
from sandmask._text import printable
from sandmask.cli import _completion
from sandmask.cli._console import counted, print_json, print_table
from sandmask.cli._inventory import announce_sources
from sandmask.cli._options import (
    CheckpointSecondsOption,
    CompileOption,
    DataDirOption,
    DiagnosticsOption,
    FastOption,
    JsonOption,
    MissingClassesOption,
    PluginOption,
    SkipCorruptOption,
    TensorBoardOption,
    allowances,
)
from sandmask.cli._sweep_plan import plan_json, print_plan
from sandmask.cli._sweep_progress import SweepDisplay, headline, result_rows, view
from sandmask.cli._sweep_request import DEFAULT_FOLDER, Folder, Request, with_request
from sandmask.cli._sweep_run import build_executor, device_list, estimator_for, share_of

if TYPE_CHECKING:
    from sandmask.sweeps import Expansion, SweepResult, SweepSpec, SweepStatus

app = typer.Typer(help="Train many: plan, run, status.", no_args_is_help=True)

Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="Stacks at a time; one a GPU, or a core, if not given."),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, or several for local workers: cuda:0,cuda:1. All GPUs if not given."),
]
MaxStack = Annotated[
    int | None,
    typer.Option("--max-stack", metavar="N", min=1, help="Runs in one program at most; as memory allows if not given."),
]
Calibrate = Annotated[
    bool, typer.Option("--calibrate/--no-calibrate", help="Whether to measure a few steps of each method.")
]


@app.command()
@with_request
def plan(
    request: Request,
    folder: Folder = DEFAULT_FOLDER,
    workers: Workers = None,
    device: Device = None,
    max_stack: MaxStack = None,
    calibrate: Calibrate = True,
    fast: FastOption = True,
    data_dir: DataDirOption = None,
    skip_corrupt: SkipCorruptOption = False,
    allow_missing_classes: MissingClassesOption = False,
    json: JsonOption = False,
) -> None:
    """Say what a sweep would take: runs, stacks, time, memory and disk, and what DIR has of it already.

    Time and memory come from a few steps measured on this machine; nothing is written.

    [bold]Examples[/bold]

    sandmask sweep plan runs/spirals --datasets Spirals --algorithms ERM,ANDMask --n-hparams 4

    sandmask sweep plan runs/spirals --config sweep.toml --no-calibrate --json
    """
    from sandmask.sweeps import JobOptions, SweepFolder, expand, make_plan, refused_changes

    target = SweepFolder(folder)
    sweep = request.sweep(target)
    expansion = expand(sweep)
    stored = target.asked()
    refused = refused_changes(stored, sweep) if stored else []
    devices, workers = device_list(device, workers)
    finished = target.finished() if folder.exists() else set()
    missing = [run for run in expansion.runs if run.id not in finished]
    options = JobOptions(
        str(folder),
        data_dir=None if data_dir is None else str(data_dir),
        allowances=allowances(skip_corrupt=skip_corrupt, allow_missing_classes=allow_missing_classes),
        weights=sweep.weights,
        fast=fast,
    )

    def say(text: str) -> None:
        if not json:
            typer.echo(text, err=True)

    estimator = estimator_for(expansion, missing, options, devices[0], measure=calibrate, say=say)
    cap = estimator.cap(share_of(len(missing), workers, max_stack))
    made = make_plan(expansion.runs, finished, estimator, cap, workers)
    notes = [*expansion.notes, *(f"{folder} holds another sweep: {reason}." for reason in refused)]
    if json:
        print_json(plan_json(made, notes))
    else:
        print_plan(made, notes, folder)


@app.command()
@with_request
def run(
    request: Request,
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
    gpus_per_worker: Annotated[
        float, typer.Option(metavar="N", min=0, help="For ray (may be a fraction) and slurm.")
    ] = 0.0,
    cpus_per_worker: Annotated[int, typer.Option(metavar="N", min=1, help="For ray and slurm.")] = 1,
    ray_address: Annotated[
        str | None, typer.Option(help="A Ray cluster, or auto; one is started if not given.")
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="partition=gpu, time=120 (minutes), account=... Repeatable."),
    ] = None,
    max_stack: MaxStack = None,
    calibrate: Calibrate = True,
    fast: FastOption = True,
    compiled: CompileOption = False,
    data_dir: DataDirOption = None,
    skip_corrupt: SkipCorruptOption = False,
    allow_missing_classes: MissingClassesOption = False,
    checkpoint_seconds: CheckpointSecondsOption = 30,
    diagnostics: DiagnosticsOption = False,
    tensorboard: TensorBoardOption = None,
    json: JsonOption = False,
) -> None:
    """Train what DIR is missing of a sweep, and nothing else: it is also the resume.

    Ctrl-C (or SIGTERM) saves and stops; the same command goes on. A kill loses half a minute at most. Several of these
    may run side by side. Asking for more draws, trials, methods, datasets or environments extends what is there.

    [bold]Examples[/bold]

    sandmask sweep run runs/spirals --datasets Spirals --algorithms ERM,IRM,ANDMask,SANDMask

    sandmask sweep run runs/spirals --n-trials 5

    sandmask sweep run runs/spirals --executor ray --ray-address auto --gpus-per-worker 0.5
    """
    from sandmask.selection import RULES
    from sandmask.sweeps import JobOptions, SweepFolder, expand, run_sweep, sweep_status

    target = SweepFolder(folder.absolute())
    sweep = request.sweep(target)
    expansion = expand(sweep)
    devices, count = device_list(device, workers)
    make, remote = build_executor(
        executor,
        target,
        workers=count if executor == "local" else workers,
        devices=devices,
        gpus=gpus_per_worker,
        cpus=cpus_per_worker,
        address=ray_address,
        slurm=slurm or [],
    )
    target.accept(sweep)
    options = JobOptions(
        folder=str(target.path),
        data_dir=None if data_dir is None else str(data_dir.absolute()),
        allowances=allowances(skip_corrupt=skip_corrupt, allow_missing_classes=allow_missing_classes),
        weights=sweep.weights,
        device=devices[0] if executor == "local" and len(devices) == 1 else device,
        fast=fast,
        compiled=compiled,
        checkpoint_seconds=checkpoint_seconds,
        plugins=request.plugins,
        carry=remote,
        diagnostics=diagnostics,
        tensorboard=None if tensorboard is None else str(tensorboard.absolute()),
    )
    finished = target.finished()
    missing = [run.dataset for run in expansion.runs if run.id not in finished]
    announce_sources(expansion, options, missing, quiet=json)
    look = partial(sweep_status, target, expansion.runs)
    with sigterm_raises(), SweepDisplay(look, quiet=json) as display:
        for note in expansion.notes:
            display.say(f"note: {note}")
        needy = [name for name in sweep.selection if RULES[name].needs_metrics]
        if needy and not diagnostics:
            display.say(f"note: {', '.join(needy)} can judge only runs that are trained with --diagnostics.")
        before = look()
        display.say(f"{headline(before)}; records in {folder}")
        estimator = estimator_for(expansion, expansion.runs, options, devices[0], measure=calibrate, say=display.say)
        cap = estimator.cap(share_of(before.planned - before.done, count, max_stack))
        try:
            result = run_sweep(target, expansion, options, make, cap, display.say)
        except KeyboardInterrupt as error:
            display.say(f"stopped; {headline(look())}. The same command goes on from what was saved.")
            raise typer.Exit(exit_status(error)) from None
    if before.done == before.planned and not json:
        typer.echo(f"Nothing to do: all {counted(before.planned, 'run')} are done. Tables: sandmask report {folder}")
        return
    _conclude(folder, sweep, expansion, result, json=json)


def _conclude(folder: Path, sweep: "SweepSpec", expansion: "Expansion", result: "SweepResult", *, json: bool) -> None:
    """Say what came out; exit status 1 where runs could not be trained."""
    if json:
        print_json({"folder": str(folder), "runs": len(expansion.runs), "done": result.done, "failed": result.failed})
    elif result.done:
        columns = ("dataset", "algorithm", *sweep.selection)
        print_table(
            "Held-out accuracy in percent, mean over environments", columns, result_rows(folder, sweep.selection)
        )
        typer.echo(f"{result.done}/{len(expansion.runs)} runs done. Tables: sandmask report {folder}")
    if result.failed:
        for reason in sorted(set(result.failed.values())):
            count = sum(each == reason for each in result.failed.values())
            typer.echo(f"{count} runs were not trained: {printable(reason)}", err=True)
        typer.echo("Fix this and rerun: finished runs are kept.", err=True)
        raise typer.Exit(1)


@app.command()
def status(
    folder: Folder = DEFAULT_FOLDER,
    watch: Annotated[bool, typer.Option("--watch", help="Keep looking, until all is done or Ctrl-C.")] = False,
    json: JsonOption = False,
    plugin: PluginOption = None,
) -> None:
    """Say how far a sweep is, from any terminal.

    [bold]Examples[/bold]

    sandmask sweep status runs/spirals --watch
    """
    from rich.console import Console

    from sandmask.errors import SandmaskError
    from sandmask.plugins import load_plugins
    from sandmask.sweeps import SweepFolder, expand, sweep_status

    load_plugins(plugin)
    target = SweepFolder(folder)
    sweep = target.asked()
    if sweep is None:
        raise SandmaskError(f"{folder} holds no sweep. Start one with: sandmask sweep run {folder} --datasets ...")
    look = partial(sweep_status, target, expand(sweep).runs)
    if json:
        print_json(look().to_json())
    elif watch:
        _watch(look)
    else:
        Console().print(view(look()))


def _watch(look: Callable[[], "SweepStatus"]) -> None:
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        while True:
            found = look()
            live.update(view(found), refresh=True)
            if found.done == found.planned:
                return
            time.sleep(1.0)
