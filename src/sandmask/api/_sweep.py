"""`sandmask.sweep` trains many runs, and `sandmask.plan_sweep` estimates their time, memory and disk."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Unpack, cast

from sandmask._arguments import Names, PathLike, checked, paths
from sandmask._signals import sigterm_raises
from sandmask._text import counted, in_shell, printable, tell
from sandmask.api._images import allowances, check_sources
from sandmask.api._progress import ShowProgress, SweepDisplay, choose_screen, headline, say_on
from sandmask.api._soup import made_soups
from sandmask.api._sweep_arguments import (
    SweepRequest,
    choose_workers,
    device_list,
    device_of_workers,
    requested_sweep,
)
from sandmask.api._swept import Sweep, all_runs
from sandmask.errors import SandmaskError
from sandmask.loggers import named_loggers
from sandmask.plugins import load_plugins
from sandmask.records import RunSpec
from sandmask.selection import RULES
from sandmask.sweeps import (
    Estimator,
    Expansion,
    JobOptions,
    Plan,
    SweepFolder,
    SweepResult,
    SweepSpec,
    SweepStatus,
    expand,
    make_plan,
    open_search,
    refused_changes,
    run_sweep,
    sweep_status,
)
from sandmask.sweeps._only import Only, only_some
from sandmask.sweeps._spec import OPTUNA
from sandmask.sweeps._status import notes_on_changed_data
from sandmask.sweeps.executors import shared_gpus
from sandmask.training.loop import CHECKPOINT_SECONDS


@checked
def sweep(
    folder: PathLike,
    datasets: Names | None = None,
    algorithms: Names | None = None,
    *,
    test_envs: Names | None = None,
    n_hparams: int | None = None,
    n_trials: int | None = None,
    space: str | None = None,
    selection: Names | None = None,
    steps: int | None = None,
    checkpoint_every: int | None = None,
    hparams: Mapping[str, str | float] | None = None,
    network: str | None = None,
    weights: str | None = None,
    precision: str | None = None,
    averages: Names | None = None,
    metrics: Names | None = None,
    train_eval_limit: int | None = None,
    keep_models: str | None = None,
    shared_init: bool | None = None,
    first_stage: PathLike | None = None,
    seed: int | None = None,
    search: str | None = None,
    sampler: str | None = None,
    pruner: str | None = None,
    config: PathLike | None = None,
    executor: str = "local",
    workers: int | None = None,
    device: str | None = None,
    mps: bool = True,
    gpus_per_worker: float = 0.0,
    cpus_per_worker: int = 1,
    ray_address: str | None = None,
    slurm: Mapping[str, str | int] | Sequence[str] = (),
    only: Only = (),
    max_stack: int | None = None,
    time_limit: float | None = None,
    calibrate: bool = True,
    fast: bool = True,
    compiled: bool = False,
    data_dir: PathLike | None = None,
    skip_corrupt: bool = False,
    allow_missing_classes: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    diagnostics: bool = False,
    tensorboard: PathLike | None = None,
    log: Sequence[str] = (),
    plugins: PathLike | Iterable[PathLike] = (),
    progress: ShowProgress = True,
) -> Sweep:
    """Train the missing runs of a sweep in a folder. The same call resumes it; asking for more extends it.

    A sweep has a run for each dataset, algorithm, held-out environment, hyperparameter draw and trial. Arguments that
    are None have the values of the sweep in the folder, or the defaults. An interrupt saves checkpoints and raises
    `KeyboardInterrupt`.

        swept = sandmask.sweep("runs/spirals", "Spirals", ["ERM", "SANDMask"], test_envs=[0], n_hparams=4, n_trials=1)
        swept.frame()      # every evaluation of every run
        swept.report()     # tables

    With one GPU, stacks of runs train in this process; with several, in a process for each; on a CPU, in a process for
    each core, up to 8. These processes do not import the calling program, so a script needs no
    `if __name__ == "__main__":`.

    :param folder: the sweep's folder.
    :param datasets: names of datasets, or your own data as in `train`: one, several with commas, or a list.
    :param algorithms: names of algorithms, or "all".
    :param test_envs: environments to hold out, one at a time, by name or number; those that tables report if not given.
    :param n_hparams: hyperparameter draws, of which number 0 is the defaults; 20 by default.
    :param n_trials: repetitions; 3 by default.
    :param space: where draws come from: "recipe" (the default), "paper" or "domainbed".
    :param selection: selection rules to train enough runs for, or "all".
    :param steps: training steps; the dataset's protocol if not given.
    :param checkpoint_every: steps between evaluations; the dataset's protocol if not given.
    :param hparams: values of hyperparameters that are fixed in every draw of the algorithms that have them.
    :param network: "mlp", "mnist-convnet", one of your own or a timm name; the dataset's protocol if not given.
    :param weights: file with pretrained weights of a timm network, or "none"; timm's own weights if not given.
    :param precision: compute precision: "fp32" (the default on a CPU), "fp32x3" (the default on a GPU), "tf32", "bf16"
        or "fp16".
    :param averages: averages of the weights that are evaluated too: "sma", "ema", "swad".
    :param metrics: metrics beyond accuracy to record: "f1", "ece", "worst-group", "per-class", "confusion", or "all".
    :param train_eval_limit: largest number of examples of each training environment on which accuracies are computed;
        all of them if not given. Validation and held-out examples are always all evaluated.
    :param keep_models: which weights of each run to keep: "none" (the default), "best" (at the checkpoint that
        training-domain selection takes) or "last".
    :param shared_init: start all runs of a trial from the same weights, as soups require.
    :param first_stage: folder of the same sweep without `full_data`, whose drops of the learning rate are repeated.
    :param seed: changes the seed of every run; 0 by default.
    :param search: "optuna" proposes hyperparameters from the results of earlier runs, instead of random draws;
        there are `n_hparams` proposals for each dataset, algorithm, held-out environment and trial.
    :param sampler: sampler of Optuna: "tpe" (the default), "random", "cmaes", "gp", "qmc", ...
    :param pruner: pruner of Optuna, which stops unpromising runs: "median" (the default), "hyperband" or "none".
    :param config: TOML file with the arguments from `datasets` to `pruner` as keys; the arguments of the call take
        precedence.
    :param executor: where to train: "local", "ray" or "slurm".
    :param workers: number of stacks that train at a time; if not given, one for each GPU or, on a CPU, for each core,
        up to 8.
    :param device: "cpu", "cuda", or several for local workers: "cuda:0,cuda:1"; all GPUs, or the CPU, if not
        given.
    :param mps: start NVIDIA's Multi-Process Service if several local workers share a GPU and it is not running.
    :param gpus_per_worker: GPUs of each worker, for Ray (may be a fraction) and Slurm.
    :param cpus_per_worker: CPU cores of each worker, for Ray and Slurm.
    :param ray_address: address of a Ray cluster, or "auto"; one is started if not given.
    :param slurm: options of Slurm, such as {"partition": "gpu", "time": 120}.
    :param only: train only these of the sweep's runs now: values of "dataset", "algorithm", "test-env", "draw" and
        "trial", such as {"trial": 1}. A later call without it trains the others.
    :param max_stack: largest number of runs that train as one program; as memory allows if not given.
    :param time_limit: seconds after which training stops, with checkpoints. Stacks that are not expected to finish by
        then are not started, and shorter ones take their place; the next call continues.
    :param calibrate: measure a few steps if memory may be short, to choose the size of stacks.
    :param fast: use CUDA graphs on a GPU.
    :param compiled: compile the network, for timm networks.
    :param data_dir: folder of the datasets.
    :param skip_corrupt: skip images that cannot be read.
    :param allow_missing_classes: allow image domains that lack some of the classes.
    :param checkpoint_seconds: seconds between checkpoints.
    :param diagnostics: also record statistics of the mask and the agreement of held-out gradients.
    :param tensorboard: folder for event files of TensorBoard.
    :param log: loggers that receive every run when it is done: "tensorboard:FOLDER", "wandb:PROJECT", "mlflow:FOLDER",
        or one that a plugin registers.
    :param plugins: Python files that register algorithms or datasets.
    :param progress: show progress in a terminal or a notebook. "lines" also prints a line every ten seconds elsewhere.
    :return: the sweep. Its `failed` has the runs that could not be trained; standard error says why. `left` counts the
        runs that the time limit left for later.
    """
    given, ends = locals(), None if time_limit is None else time.time() + time_limit
    asked = cast("SweepRequest", {name: given[name] for name in SweepRequest.__annotations__})
    screen = choose_screen(progress)  # raises an error for a wrong value before anything is written
    plugin_files = tuple(str(path.expanduser().resolve()) for path in paths(plugins))
    load_plugins(plugin_files)
    loggers = named_loggers(log, tensorboard)
    target = SweepFolder(Path(folder).absolute())
    spec = requested_sweep(target, device_of_workers(executor, device, gpus_per_worker), **asked)
    expansion = _chosen(spec, only)
    chosen = choose_workers(
        target,
        spec,
        executor=executor,
        device=device,
        slurm=slurm,
        workers=workers,
        gpus_per_worker=gpus_per_worker,
        cpus_per_worker=cpus_per_worker,
        ray_address=ray_address,
    )
    target.accept(spec)
    options = JobOptions(
        folder=str(target.path),
        ends=ends,
        data_dir=None if data_dir is None else str(Path(data_dir).absolute()),
        allowances=tuple(allowances(skip_corrupt=skip_corrupt, allow_missing_classes=allow_missing_classes)),
        weights=spec.weights,
        device=chosen.device,
        fast=fast,
        compiled=compiled,
        checkpoint_seconds=checkpoint_seconds,
        plugins=plugin_files,
        carry=chosen.remote,
        diagnostics=diagnostics,
        loggers=loggers,
        metrics=spec.metrics,
        train_eval_limit=spec.train_eval_limit,
        keep_models=spec.keep_models,
        pruner=spec.pruner if spec.search == OPTUNA else "none",
        cores=chosen.cores,
        workers=workers,
        calibrate=calibrate,
    )
    studies = open_search(target, spec, expansion, partial(say_on, screen))

    def runs() -> tuple[RunSpec, ...]:
        return expansion.runs if studies is None else studies.runs()

    def status() -> SweepStatus:
        return sweep_status(target, runs())

    finished = target.finished()
    check_sources(expansion, options, [run.dataset for run in runs() if run.id not in finished], screen)
    with sigterm_raises(), SweepDisplay(status, screen) as display:
        notes = (*notes_on_changed_data(target, expansion.sources), *_notes_on_rules(spec, diagnostics=diagnostics))
        for note in (*expansion.notes, *chosen.notes, *notes):
            display.say(f"note: {note}")
        before = status()
        display.say(f"{headline(before)}; records in {Path(folder)}")
        late = [option for option, given in (("--diagnostics", diagnostics), ("--log", loggers)) if given]
        if before.done and late:
            display.say(f"note: finished runs are not changed: {' and '.join(late)} cannot be added to them.")
        estimator = Estimator(
            expansion, options, chosen.devices[0], measure=calibrate, elsewhere=chosen.elsewhere, notice=display.say
        )
        at_once = before.planned - before.done if studies is None else studies.at_a_time
        cap, arrange = estimator.cap(at_once, chosen.count, max_stack), estimator.arrange(chosen.count)
        try:
            with shared_gpus(display.say) if mps and chosen.shares else nullcontext():
                result = run_sweep(
                    target, expansion, options, chosen.executor, cap, display.say, arrange, studies, estimator.step_work
                )
        except KeyboardInterrupt as error:
            error.add_note(f"stopped; {headline(status())}. Rerun the same command to continue.")
            display.say(error.__notes__[-1])
            raise
    _say_failures(result)
    if result.done > before.done and (kinds := made_soups(target.path)):
        again = f"sandmask soup {in_shell(Path(folder))} --kind {','.join(kinds)}"
        tell(f"note: the soups do not include the new runs. Make them again: {again}")
    return Sweep(Path(folder), spec, runs(), result.done - before.done, result.failed, result.left)


def _chosen(spec: SweepSpec, only: Only) -> Expansion:
    if only and spec.search == OPTUNA:
        raise SandmaskError("--only does not work with --search optuna, which proposes runs one after the other.")
    return only_some(expand(spec), only)


def _notes_on_rules(spec: SweepSpec, *, diagnostics: bool) -> list[str]:
    needy = [name for name in spec.selection if RULES[name].needs_metrics]
    return [f"{', '.join(needy)} needs runs that were trained with --diagnostics."] if needy and not diagnostics else []


def _say_failures(result: SweepResult) -> None:
    for reason in sorted(set(result.failed.values())):
        count = sum(each == reason for each in result.failed.values())
        tell(f"{counted(count, 'run')} not trained: {printable(reason)}")
    if result.failed:
        tell("Fix this and rerun: finished runs are kept.")


@checked
def plan_sweep(
    folder: PathLike,
    *,
    workers: int | None = None,
    device: str | None = None,
    only: Only = (),
    max_stack: int | None = None,
    calibrate: bool = True,
    fast: bool = True,
    data_dir: PathLike | None = None,
    skip_corrupt: bool = False,
    allow_missing_classes: bool = False,
    plugins: PathLike | Iterable[PathLike] = (),
    progress: ShowProgress = True,
    **request: Unpack[SweepRequest],
) -> Plan:
    """Estimate the runs, stacks, time, memory and disk of a sweep. Nothing is written.

        plan = sandmask.plan_sweep("runs/spirals", datasets="Spirals", algorithms=["ERM", "SANDMask"])
        plan.seconds, plan.memory_bytes, plan.disk_bytes
        plan.frame()       # stack by stack

    :param folder: the sweep's folder. Its finished runs need no time.
    :param workers: number of stacks that train at a time.
    :param device: "cpu", "cuda", or several.
    :param only: count only these of the sweep's runs, as in `sweep`.
    :param max_stack: largest number of runs that train as one program.
    :param calibrate: measure a few steps of each method; otherwise there is no estimate of the time.
    :param fast: use CUDA graphs on a GPU.
    :param data_dir: folder of the datasets.
    :param skip_corrupt: skip images that cannot be read.
    :param allow_missing_classes: allow image domains that lack some of the classes.
    :param plugins: Python files that register algorithms or datasets.
    :param progress: say what is being measured, in a terminal or a notebook.
    :param request: the arguments of `sweep` that say which runs there are, from `datasets` to `config`.
    """
    screen = choose_screen(progress)
    load_plugins(paths(plugins))
    target = SweepFolder(Path(folder))
    spec = requested_sweep(target, device, **request)
    expansion = _chosen(spec, only)
    runs = all_runs(target, spec, expansion)
    stored = target.read_spec()
    devices, count = device_list(device, workers)
    finished = target.finished() if target.path.exists() else set()
    options = JobOptions(
        str(folder),
        data_dir=None if data_dir is None else str(Path(data_dir).absolute()),
        allowances=tuple(allowances(skip_corrupt=skip_corrupt, allow_missing_classes=allow_missing_classes)),
        weights=spec.weights,
        fast=fast,
        train_eval_limit=spec.train_eval_limit,
        keep_models=spec.keep_models,
    )
    estimator = Estimator(expansion, options, devices[0], measure=calibrate, notice=partial(say_on, screen))
    cap = estimator.cap(sum(run.id not in finished for run in runs), count, max_stack)
    refused = refused_changes(stored, spec) if stored else []
    notes = (*expansion.notes, *(f"{folder} holds another sweep: {reason}." for reason in refused))
    shared = None if devices == ("cpu",) else len(devices)
    return make_plan(runs, finished, estimator, cap, count, notes, shared)
