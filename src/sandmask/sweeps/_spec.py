"""Sweep specs, which describe all runs of a sweep, and their TOML files."""

import json
import tomllib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from sandmask._files import replacing
from sandmask.errors import SandmaskError
from sandmask.hparams import DEFAULT_SPACE
from sandmask.records._averages import FULL_DATA
from sandmask.registry import closest
from sandmask.training import KEPT
from sandmask.training.specs import check_train_eval_limit

ALL = "all"
_GROWING_LISTS = ("datasets", "algorithms", "test_envs", "selection")
_GROWING_NUMBERS = ("n_hparams", "n_trials")
_CHECKSUM = "# crc32 = "  # in the first line, which a truncated file still has
# Left out of files if they have their defaults, because older versions do not know them.
_UNUSUAL = ("metrics", "keep_models", "shared_init", "search", "sampler", "pruner")
_KINDS = {bool: "true or false", int: "a whole number", str: "a text in quotes"}
RESTORE = "Restore the file, or remove it and request the same sweep again; finished runs are kept."
OPTUNA = "optuna"
SEARCHES = ("none", OPTUNA)
PRUNERS = ("median", "hyperband", "none")


@dataclass(frozen=True)
class SweepSpec:
    """Datasets x algorithms x held-out environments x hyperparameter draws x trials.

    `test_envs` are names or numbers, or ("all",) for the environments that the tables report. There are `n_hparams`
    draws: number 0 is the defaults, the others are random. `hparams` are set by hand in every draw of the algorithms
    that have them. `steps`, `checkpoint_every` and `network` are those of the dataset's protocol if they are None.
    `seed` changes every run's own seed and the proposals of a search, but not random draws. `averages` of the weights
    ("sma", "ema", "swad") are evaluated in addition to the weights themselves. `metrics` are recorded in addition to
    accuracy. `train_eval_limit` limits the examples of each training environment that are evaluated; None means all.

    `keep_models` says which weights of each run stay in the folder ("none", "best", "last"). With `shared_init`, all
    runs of a trial start from the same weights. `first_stage` is the folder of a sweep of the same runs with
    `lr_patience`; runs on all data (`full_data`) repeat its drops of the learning rate. With `search` "optuna", the
    `sampler` proposes hyperparameters instead of random draws, and the `pruner` stops runs early.
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
    train_eval_limit: int | None = None
    keep_models: str = "none"
    shared_init: bool = False
    first_stage: str | None = None
    search: str = "none"
    sampler: str = "tpe"
    pruner: str = "median"

    def __post_init__(self) -> None:
        for name in _GROWING_LISTS:
            values = getattr(self, name)
            if not values:
                raise SandmaskError(f"A sweep needs at least one entry in {name}. Found none.")
            if len(set(values)) != len(values):
                raise SandmaskError(f"{name} should not contain duplicates. Found {', '.join(values)}.")
        for name in _GROWING_NUMBERS:
            if getattr(self, name) < 1:
                raise SandmaskError(f"{name} should be at least 1. Found {getattr(self, name)}.")
        check_train_eval_limit(self.train_eval_limit)
        if not 0 <= self.seed < 2**63:
            raise SandmaskError(f"seed should be from 0 to 2^63 - 1. Found {self.seed}.")
        self._check_words()
        if ALL in self.test_envs and len(self.test_envs) > 1:
            raise SandmaskError("test_envs should be 'all' or a list of environments, not both.")

    @property
    def full_data(self) -> bool:
        """Whether runs also train on the examples that are held back for selection."""
        return float(self.hparams.get(FULL_DATA, 0)) > 0

    def _check_words(self) -> None:
        for name, known in (("keep_models", KEPT), ("search", SEARCHES), ("pruner", PRUNERS)):
            if getattr(self, name) not in known:
                raise SandmaskError(f"{name} should be one of {', '.join(known)}. Found {getattr(self, name)!r}.")
        if self.search == "none" and (self.sampler, self.pruner) != (SweepSpec.sampler, SweepSpec.pruner):
            raise SandmaskError("--sampler and --pruner are for --search optuna.")


_FIELDS = {each.name: each for each in fields(SweepSpec)}
LISTS = tuple(name for name, each in _FIELDS.items() if each.type == tuple[str, ...])


def refused_changes(old: SweepSpec, new: SweepSpec) -> list[str]:
    """Return the reasons why a folder that holds `old` cannot be extended to `new`.

    More draws, trials, algorithms, datasets, environments or rules extend a sweep. Any other change would leave runs
    there that do not belong to it.

    :param old: the sweep in the folder.
    :param new: the requested sweep.
    :return: one line per reason; empty if the folder can be extended.
    """
    reasons = []
    for name in _FIELDS:
        was, asked = getattr(old, name), getattr(new, name)
        if was == asked or _contains(name, was, asked):
            continue
        reasons.append(f"{name} is {_shown(was)} there, but {_shown(asked)} was requested")
    return reasons


def _contains(name: str, was: Any, asked: Any) -> bool:
    """Whether the new value of a field includes all runs of the old one."""
    if name in _GROWING_NUMBERS:
        return bool(was <= asked)
    if name == "hparams":
        return _numbers(was) == _numbers(asked)
    if name == "test_envs" and asked == (ALL,):
        return True
    return name in _GROWING_LISTS and ALL not in was and set(was) <= set(asked)


def _numbers(hparams: Mapping[str, str | float]) -> dict[str, str | float]:
    """The values as numbers: on the command line, 8 is given as "8"."""
    numbers: dict[str, str | float] = {}
    for name, value in hparams.items():
        try:
            numbers[name] = float(value)
        except ValueError:
            numbers[name] = value
    return numbers


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "nothing"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={each}" for name, each in value.items()) or "nothing"
    return "the default" if value is None else str(value)


def read_sweep(path: Path, *, verify: bool = False) -> dict[str, Any]:
    """Read and check the fields of a sweep file; `SweepSpec(**fields)` is the sweep.

    :param path: TOML file.
    :param verify: compare the content with the checksum in the first line, if there is one.
    """
    remedy = f" {RESTORE}" if verify else ""
    try:
        text = path.read_bytes().decode("utf-8")
        if verify:
            _verify(path, text)
        data = tomllib.loads(text)
    except FileNotFoundError as error:
        raise SandmaskError(f"There is no file {path}.") from error
    except OSError as error:
        raise SandmaskError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SandmaskError(f"{path} is not valid TOML: {error}.{remedy}") from error
    except RecursionError as error:
        raise SandmaskError(f"{path} is not valid TOML: its values are nested too deeply.{remedy}") from error
    unknown = [f"{path}: unknown key {key!r}. {closest(key, list(_FIELDS))}" for key in data if key not in _FIELDS]
    if unknown:
        raise SandmaskError(" ".join(unknown))
    return {key: _checked(path, key, value) for key, value in data.items()}


def _checked(path: Path, key: str, value: Any) -> Any:
    """A value of the field `key`, converted to its type; a wrong type is an error."""
    if key in LISTS:
        values = value if isinstance(value, list) else [value]
        if all(type(each) in (str, int) for each in values):
            return tuple(str(each) for each in values)
        raise SandmaskError(f"{path}: {key} should be a list of names. Found {value!r}.")
    if key == "hparams":
        if isinstance(value, dict) and all(isinstance(each, str | int | float) for each in value.values()):
            return value
        raise SandmaskError(f"{path}: [hparams] should be a table of name = value. Found {value!r}.")
    declared = _FIELDS[key].type
    kind = (get_args(declared) or (declared,))[0]  # int for `int | None`
    if type(value) is not kind:
        raise SandmaskError(f"{path}: {key} should be {_KINDS[kind]}. Found {value!r}.")
    return value


def _verify(path: Path, text: str) -> None:
    first, _, rest = text.partition("\n")
    if first.startswith(_CHECKSUM) and first != _checksum(rest):
        raise SandmaskError(
            f"{path} does not match its checksum: it is damaged or was edited. Restore it, or, if you edited it, "
            "remove its first line, the checksum."
        )


def _checksum(text: str) -> str:
    return f"{_CHECKSUM}{zlib.crc32(text.encode()):08x}"


def write_sweep(sweep: SweepSpec, path: Path) -> None:
    """Write a sweep file with a checksum in the first line. The file is complete or absent, and synced.

    :param sweep: the sweep.
    :param path: file to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = to_toml(sweep)
    with replacing(path, durable=True) as temporary:
        temporary.write_text(f"{_checksum(text)}\n{text}", encoding="utf-8", newline="\n")


def to_toml(sweep: SweepSpec) -> str:
    """Return the text of a sweep file, with every field that is set.

    :param sweep: the sweep.
    """
    lines = []
    for name, each in _FIELDS.items():
        value = getattr(sweep, name)
        left_out = value is None or name == "hparams" or (name in _UNUSUAL and value == each.default)
        if not left_out:
            lines.append(f"{name} = {_value(value)}")
    if sweep.hparams:
        lines += ["", "[hparams]", *(f"{_value(name)} = {_value(value)}" for name, value in sweep.hparams.items())]
    return "\n".join([*lines, ""])


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_value(each) for each in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    # JSON strings are TOML strings once DEL is escaped; repr keeps every bit of a number.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
