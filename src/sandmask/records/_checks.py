"""Checks of specs and records, shared by readers and writers. They raise `ValueError`."""

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from sandmask.records._measures import SPLITS, table_size
from sandmask.records._types import RunRecord, RunSpec, Sizes, Status

LONGEST_NAME = 1000  # characters; a longer name comes from a damaged file, and would make tables unreadable
LARGEST_INTEGER = 2**63 - 1
LARGEST_SPLIT = 2**30 - 1  # examples; archives store a change of a count with its sign in 32 bits
_WORDS = ("dataset", "algorithm", "space", "network", "weights", "precision")
_COUNTS = ("steps", "checkpoint_every")
_SEEDS = ("hparams_seed", "trial_seed", "seed")


def check_run(
    run_id: str, spec: RunSpec, env_names: Sequence[Any], classes: Sequence[Any], sizes: Sizes | None
) -> None:
    """Check the first line of a run: id, spec, names and sizes."""
    check_spec(spec)
    if run_id != spec.id:
        raise ValueError(f"the id {run_id!r} does not belong to the spec, whose id is {spec.id!r}")
    check_names("environment", env_names)
    check_names("class", classes)
    if len(set(env_names)) != len(env_names):
        raise ValueError(f"two environments have the same name: {list(env_names)}")
    if not env_names:
        raise ValueError("there are no environments")
    outside = [env for env in spec.test_envs if env >= len(env_names)]
    if outside:
        raise ValueError(f"environment {outside[0]} is held out, but there are only {len(env_names)} environments")
    if sizes is not None:
        _check_sizes(sizes, len(env_names))


def _check_sizes(sizes: Sizes, environments: int) -> None:
    if list(map(len, sizes)) != [environments] * len(SPLITS):
        raise ValueError(f"sizes should be two lists, of the in and out splits of {environments} environments")
    for size in chain(*sizes):
        if type(size) is not int or not 1 <= size <= LARGEST_SPLIT:
            raise ValueError(f"the size of a split should be an integer from 1 to {LARGEST_SPLIT:,}, not {size!r}")


def check_spec(spec: RunSpec) -> None:
    """Check the types and ranges of a spec's fields, which a dataclass does not check."""
    check_names("setting", [getattr(spec, name) for name in _WORDS])
    for name in _COUNTS + _SEEDS:
        check_integer(name, getattr(spec, name), least=1 if name in _COUNTS else None)
    for env in spec.test_envs:
        check_integer("test_envs", env)
    if len(set(spec.test_envs)) != len(spec.test_envs):
        raise ValueError(f"test_envs {list(spec.test_envs)} contain an environment twice")
    if not isinstance(spec.hparams, dict) or not isinstance(spec.options, dict):
        raise ValueError("hparams and options should be JSON objects")
    check_values("hparams", spec.hparams)
    check_values("options", spec.options)


def check_integer(name: str, value: Any, *, least: int | None = 0) -> None:
    """Check that a value is an integer that fits 64 bits and is at least `least`."""
    if type(value) is not int or abs(value) > LARGEST_INTEGER or (least is not None and value < least):
        raise ValueError(
            f"{name} should be an integer{'' if least is None else f' of at least {least}'}, not {value!r}"
        )


def check_names(kind: str, names: Iterable[Any]) -> None:
    """Check that names are strings of valid Unicode and of a reasonable length."""
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"the {kind} name {name!r} is not a string")
        if len(name) > LONGEST_NAME:
            raise ValueError(
                f"the {kind} name {name[:20]!r}... has {len(name):,} characters, and at most {LONGEST_NAME:,} are read"
            )
        if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise ValueError(f"the {kind} name {name!r} is not valid Unicode")


def check_values(kind: str, value: Any) -> None:
    """Check nested JSON values: strings as in `check_names`, and finite numbers of at most 64 bits."""
    if isinstance(value, dict):
        check_names(kind, value)
        for one in value.values():
            check_values(kind, one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            check_values(kind, one)
    elif isinstance(value, str):
        check_names(kind, [value])
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{kind} contain {value}, which is not a finite number")
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{kind} contain an integer of more than 64 bits")


def check_accuracies(values: Any, environments: int, sizes: Sequence[int] | None) -> None:
    """Check accuracies in 0..1, one for each environment. If the size of a split is known, it is a count over it."""
    if not isinstance(values, list) or len(values) != environments:
        found = len(values) if isinstance(values, list) else repr(values)
        raise ValueError(f"there are accuracies of {found} environments, but {environments} are named")
    for value in values:
        if type(value) not in (float, int) or not 0 <= value <= 1:
            raise ValueError(f"accuracies should be numbers from 0 to 1, not {value!r}")
    if sizes is not None:
        _check_fractions(np.array(values, dtype=np.float64), sizes)


def _check_fractions(accuracies: NDArray[np.float64], sizes: Sequence[int]) -> None:
    """Check that accuracies [..., environments] are counts over the sizes, so that counts store them exactly."""
    divisors = np.array(sizes)
    is_wrong = np.rint(accuracies * divisors) / divisors != accuracies
    if is_wrong.any():
        raise ValueError(f"accuracies should be counts over splits of {list(sizes)}, not {accuracies[is_wrong][0]}")


def check_counts(name: str, values: Any, length: int) -> None:
    """Check the table of a line: a list of `length` counts."""
    if not isinstance(values, list) or len(values) != length:
        raise ValueError(f"the table {name!r} should be a list of {length} counts")
    for value in values:
        check_integer("a count", value)


def _check_tables(run: RunRecord) -> None:
    for name, table in run.tables.items():
        size = table_size(name, len(run.env_names), len(run.classes))
        if table.shape != (len(run.steps), size) or (table.size and table.min() < 0):
            raise ValueError(f"its table {name!r} should have {size} counts at each of {len(run.steps)} steps")


def check_record(run: RunRecord) -> None:
    """Check a whole record: its spec, names, steps and accuracies."""
    try:
        check_run(run.spec.id, run.spec, run.env_names, run.classes, run.sizes)
        check_names("metric", run.metrics)
        shape = (len(run.steps), len(run.env_names))
        if run.accuracy_in.shape != shape or run.accuracy_out.shape != shape:
            raise ValueError(f"its accuracies do not have the shape of {shape[0]} steps and {shape[1]} environments")
        if any(curve.shape != shape[:1] for curve in run.metrics.values()):
            raise ValueError(f"it has {shape[0]} steps, but a metric has another number of values")
        _check_tables(run)
        if len(run.steps) and (run.steps[0] < 0 or (np.diff(run.steps) <= 0).any()):
            raise ValueError("its steps do not increase")
        if run.status not in get_args(Status):
            raise ValueError(f"its status {run.status!r} is not one of {', '.join(get_args(Status))}")
        for table, sizes in zip((run.accuracy_in, run.accuracy_out), run.sizes or (None, None), strict=True):
            if table.size and not (table.min() >= 0 and table.max() <= 1):  # also rejects NaN
                raise ValueError("its accuracies should be numbers from 0 to 1")
            if sizes is not None:
                _check_fractions(table, sizes)
    except ValueError as error:
        raise ValueError(f"run {run.spec.id}: {error}") from error
