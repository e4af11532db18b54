"""`sandmask.plan_sweep`: what a sweep takes."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Unpack

from sandmask._arguments import checked, paths
from sandmask.api._progress import ShowProgress, choose_screen, say_on
from sandmask.api._sweep import PathLike, SweepRequest
from sandmask.api._sweep_arguments import allowances, device_list, requested_sweep
from sandmask.api._swept import all_runs
from sandmask.plugins import load_plugins
from sandmask.sweeps import Estimator, JobOptions, Plan, SweepFolder, expand, make_plan, refused_changes


@checked
def plan_sweep(
    folder: PathLike,
    *,
    workers: int | None = None,
    device: str | None = None,
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
    """Estimate what a sweep takes: runs, stacks, time, memory and disk. Nothing is written.

        plan = sandmask.plan_sweep("runs/spirals", datasets="Spirals", algorithms=["ERM", "SANDMask"])
        plan.seconds, plan.memory_bytes, plan.disk_bytes
        plan.frame()       # stack by stack

    :param folder: the sweep's folder, whose finished runs are not counted.
    :param workers: stacks that train at a time.
    :param device: "cpu", "cuda", or several.
    :param max_stack: runs that train as one program at most.
    :param calibrate: measure a few steps of each method; without, there is no estimate of the time.
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
    expansion = expand(spec)
    runs = all_runs(target, spec, expansion)
    stored = target.asked()
    devices, count = device_list(device, workers)
    finished = target.finished() if target.path.exists() else set()
    options = JobOptions(
        str(folder),
        data_dir=None if data_dir is None else str(Path(data_dir).absolute()),
        allowances=allowances(skip_corrupt=skip_corrupt, allow_missing_classes=allow_missing_classes),
        weights=spec.weights,
        fast=fast,
        keep_models=spec.keep_models,
    )
    missing = tuple(run for run in runs if run.id not in finished)
    estimator = Estimator(
        expansion, options, devices[0], runs=missing, measure=calibrate, notice=partial(say_on, screen)
    )
    cap = estimator.cap(len(missing), count, max_stack)
    refused = refused_changes(stored, spec) if stored else []
    notes = (*expansion.notes, *(f"{folder} holds another sweep: {reason}." for reason in refused))
    return make_plan(runs, finished, estimator, cap, count, notes)
