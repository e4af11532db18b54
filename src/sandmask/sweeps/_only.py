"""Choose some of a sweep's runs to train now, and leave the others for later."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sandmask._arguments import Names, names_in
from sandmask.algorithms import ALGORITHMS
from sandmask.datasets import absolute, dataset_entry, resolve_environment
from sandmask.errors import SandmaskError
from sandmask.records import RunSpec
from sandmask.registry import check_known
from sandmask.sweeps._expand import Expansion

Only = Mapping[str, Names] | Sequence[str]
Matches = Callable[[RunSpec, str], bool]


def _held_out(run: RunSpec, env: str) -> bool:
    return resolve_environment(dataset_entry(run.dataset), env) in run.test_envs


CONDITIONS: dict[str, Matches] = {
    "dataset": lambda run, name: run.dataset == dataset_entry(absolute(name)).name,
    "algorithm": lambda run, name: run.algorithm == ALGORITHMS[name].name,
    "test-env": _held_out,
    "draw": lambda run, number: str(run.hparams_seed) == number,
    "trial": lambda run, number: str(run.trial_seed) == number,
}


def only_some(expansion: Expansion, only: Only) -> Expansion:
    """Return the runs that meet all conditions, with a note on their number.

    :param expansion: all runs of a sweep.
    :param only: values of "dataset", "algorithm", "test-env", "draw" and "trial": {"trial": 1}, or ["trial=1"].
    """
    wanted, runs = _parsed(only), expansion.runs
    for name in wanted:
        check_known("condition of --only", name, CONDITIONS)
    for name in (each for each in CONDITIONS if each in wanted):  # environments of the chosen datasets only are known
        values, matches = wanted[name], CONDITIONS[name]
        runs = tuple(run for run in runs if any(matches(run, value) for value in values))
        if not runs:
            raise SandmaskError(f"--only {name}={','.join(values)} leaves no runs of this sweep to train.")
    if len(runs) == len(expansion.runs):
        return expansion
    note = f"--only chooses {len(runs):,} of the sweep's {len(expansion.runs):,} runs; the others are left for later."
    return replace(expansion, runs=runs, notes=(*expansion.notes, note))


def _parsed(only: Only) -> dict[str, tuple[str, ...]]:
    if isinstance(only, Mapping):
        return {name.replace("_", "-"): names_in(values) for name, values in only.items()}
    parsed: dict[str, tuple[str, ...]] = {}
    for item in only:
        name, _, values = item.partition("=")
        if not (name.strip() and values.strip()):
            raise SandmaskError(f"--only should look like NAME=VALUE, such as trial=1. Found {item!r}.")
        name = name.strip().replace("_", "-")
        parsed[name] = (*parsed.get(name, ()), *names_in(values))
    return parsed
