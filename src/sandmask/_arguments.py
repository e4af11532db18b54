"""Checks of the arguments of public functions. An argument of one name accepts the same values in all functions.

Without a check, a wrong type would be found late, after something was written, or not at all. NumPy numbers become
Python numbers, which records can hold; generators become lists.
"""

import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from sandmask.errors import SandmaskError

P = ParamSpec("P")
R = TypeVar("R")
PathLike = str | os.PathLike[str]
Names = str | int | Sequence[str | int | os.PathLike[str]]  # one name, several with commas between, or a list
Check = Callable[[Any], Any]  # returns the value to use; raises TypeError or ValueError for a wrong one


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that the arguments in `CHECKS` are checked, unless they are equal to their default."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises Python's error for a missing or unknown argument
        for name, value in bound.arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: _checked(key, each, None) for key, each in value.items()}
            else:
                bound.arguments[name] = _checked(name, value, parameter.default)
        return function(*bound.args, **bound.kwargs)

    return call


def paths(value: PathLike | Iterable[PathLike]) -> list[Path]:
    """One path or several as a list."""
    return [Path(each) for each in ([value] if isinstance(value, str | os.PathLike) else value)]


def names_in(value: Names) -> tuple[str, ...]:
    """The names in an argument: `"a,b"`, `["a", "b"]` and `["a,b"]` are the same. Existing paths may contain commas."""
    items = [value] if isinstance(value, str | int) else value
    words: list[str] = []
    for item in (each if isinstance(each, str) else str(each) for each in items):  # `str` of an enum is not its value
        is_path = os.path.exists(item)  # noqa: PTH110 - false for what cannot be a path
        words += [item] if is_path else [word.strip() for word in item.split(",")]
    return tuple(word for word in words if word)


def _checked(name: str, value: Any, default: Any) -> Any:
    if name not in CHECKS or value is default:
        return value
    kind, check = CHECKS[name]
    try:
        return check(value)
    except (TypeError, ValueError):
        shown = repr(value)
        shown = f"{shown[:77]}..." if len(shown) > 80 else shown
    raise SandmaskError(f"{name} should be {kind}. Found {shown}.")


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _number(value: Any) -> float:
    if isinstance(value, bool | str | bytes) or not value >= 0:
        raise TypeError
    return float(value)


def _flag(value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError
    return bool(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _path(value: Any) -> Any:
    if "\0" in _text(os.fspath(value)):
        raise ValueError
    return value


def _run(value: Any) -> Any:
    return value if callable(getattr(value, "predict", None)) else _path(value)


def _name(value: Any) -> Any:
    return value if isinstance(value, str) else os.fspath(value) if isinstance(value, os.PathLike) else _whole(value)


def _one_or_more(check: Check) -> Check:
    """Return a check that accepts one value or several, and returns a list."""

    def checked_list(value: Any) -> list[Any]:
        if isinstance(value, bytes):
            raise TypeError
        several = isinstance(value, Iterable) and not isinstance(value, str | os.PathLike)
        if getattr(value, "ndim", 1) == 0 or not several:
            return [check(value)]
        return [check(each) for each in value]

    return checked_list


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {_text(name): each for name, each in value.items()}


def _settings(value: Any) -> Any:
    return value if isinstance(value, Mapping) else _one_or_more(_text)(value)


_COUNTS = """
    steps checkpoint_every hparams_seed trial_seed seed n_hparams n_trials train_eval_limit workers cpus_per_worker
    max_stack top draws trials
"""
_FLAGS = """
    fast compiled diagnostics shared_init keep_checkpoint skip_corrupt allow_missing_classes calibrate mps against_paper
"""
_TEXTS = "algorithm space network precision keep_models search sampler pruner executor ray_address baseline select_by"
_KINDS: dict[str, tuple[Check, str]] = {
    "a whole number": (_whole, _COUNTS),
    "a number, 0 or more": (_number, "checkpoint_seconds gpus_per_worker time_limit"),
    "a text": (_text, _TEXTS),
    "a name or a path": (_path, "dataset"),
    "a path": (_path, "folder out data_dir config tensorboard weights first_stage against"),
    "a folder, a model file or a trained run": (_run, "run"),
    "a path or several": (_one_or_more(_path), "paths files plugins"),
    "a name or number, or several": (
        _one_or_more(_name),
        "test_env test_envs datasets algorithms averages metrics selection kinds of",
    ),
    "a mapping from names to values": (_mapping, "hparams"),
    "True or False": (_flag, _FLAGS),
    "NAME=VALUE, several of these, or a mapping": (_settings, "slurm only"),
    "the name of a device": (str, "device"),
}
CHECKS: dict[str, tuple[str, Check]] = {
    name: (kind, check) for kind, (check, names) in _KINDS.items() for name in names.split()
}
