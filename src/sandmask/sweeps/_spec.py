"""Sweep specs: the description from which all runs of a sweep follow."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from sandmask.errors import SandmaskError
from sandmask.hparams import DEFAULT_SPACE
from sandmask.training import KEPT

ALL = "all"
_GROWING_LISTS = ("datasets", "algorithms", "selection")
_GROWING_NUMBERS = ("n_hparams", "n_trials")


@dataclass(frozen=True)
class SweepSpec:
    """Datasets x algorithms x held-out environments x hyperparameter draws x trials.

    `test_envs` are names or numbers, or ("all",): those that the tables report. `n_hparams` draws are numbers 0 (the
    defaults) to n - 1. `hparams` are set by hand in every draw of the algorithms that have them. What is None
    follows the dataset's protocol. `seed` changes every run's own seed, and nothing else. `averages` of the weights
    ("sma", "ema", "swad") are evaluated beside the weights themselves. `metrics` beyond accuracy are recorded;
    `keep_models` says which weights of each run stay in the folder ("none", "best", "last"). With `shared_init`, all
    runs of a trial start from the same weights.
    """

    datasets: tuple[str, ...]
    algorithms: tuple[str, ...]
    test_envs: tuple[str, ...] = (ALL,)
    n_hparams: int = 20
    n_trials: int = 3
    space: str = DEFAULT_SPACE
    selection: tuple[str, ...] = ("training-domain", "oracle")
    steps: int | None = None
    checkpoint_every: int | None = None
    network: str | None = None
    weights: str | None = None
    precision: str = "fp32"
    seed: int = 0
    hparams: Mapping[str, str | float] = field(default_factory=dict)
    averages: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    keep_models: str = "none"
    shared_init: bool = False

    def __post_init__(self) -> None:
        for name in ("datasets", "algorithms", "test_envs", "selection"):
            values = getattr(self, name)
            if not values:
                raise SandmaskError(f"A sweep needs at least one entry in {name}. Found none.")
            if len(set(values)) != len(values):
                raise SandmaskError(f"{name} should not contain duplicates. Found {', '.join(values)}.")
        for name in _GROWING_NUMBERS:
            if getattr(self, name) < 1:
                raise SandmaskError(f"{name} should be at least 1. Found {getattr(self, name)}.")
        if not 0 <= self.seed < 2**63:
            raise SandmaskError(f"seed should be from 0 to 2^63 - 1. Found {self.seed}.")
        if self.keep_models not in KEPT:
            raise SandmaskError(f"keep_models should be one of {', '.join(KEPT)}. Found {self.keep_models!r}.")
        if ALL in self.test_envs and len(self.test_envs) > 1:
            raise SandmaskError("test_envs should be 'all' or a list of environments, not both.")


def refused_changes(old: SweepSpec, new: SweepSpec) -> list[str]:
    """Return the reasons why a folder that holds `old` cannot be extended to `new`.

    More draws, trials, algorithms, datasets, environments or rules extend a sweep. Any other change would leave runs
    there that do not belong to it.

    :param old: the sweep in the folder.
    :param new: the requested sweep.
    :return: one line per reason; empty if the folder can be extended.
    """
    reasons = []
    for name in (each.name for each in fields(SweepSpec)):
        was, asked = getattr(old, name), getattr(new, name)
        if was == asked or _contains(name, was, asked):
            continue
        reasons.append(f"{name} is {_shown(was)} there, {_shown(asked)} was asked for")
    return reasons


def _contains(name: str, was: object, asked: object) -> bool:
    if name in _GROWING_NUMBERS:
        return isinstance(was, int) and isinstance(asked, int) and asked >= was
    if name == "test_envs" and asked == (ALL,):
        return True
    if name == "hparams" and isinstance(was, Mapping) and isinstance(asked, Mapping):
        return _numbers(was) == _numbers(asked)
    if name in (*_GROWING_LISTS, "test_envs") and isinstance(was, tuple) and isinstance(asked, tuple):
        return ALL not in was and set(was) <= set(asked)
    return False


def _numbers(hparams: Mapping[str, str | float]) -> dict[str, str | float]:
    """The values as numbers: the command line writes "8" where a program says 8."""
    numbers: dict[str, str | float] = {}
    for name, value in hparams.items():
        try:
            numbers[name] = float(value)
        except ValueError:
            numbers[name] = value
    return numbers


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={each}" for name, each in value.items()) or "nothing"
    return "the protocol's" if value is None else str(value)
