"""Spaces, which contain the hyperparameters of an algorithm on a dataset, and configurations drawn from them."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sandmask.errors import SandmaskError
from sandmask.hparams._hparam import DEFAULT_SPACE, SCOPES, SPACES, Hparam, Like, scope_name
from sandmask.hparams._shared import OPTIONAL, SHARED
from sandmask.registry import closest


def seed_hash(*args: object) -> int:
    """Derive a seed in 0 .. 2^31 - 1 from any values, as in DomainBed, by the md5 hash of their printed tuple.

    NumPy scalars give the same seed as the Python numbers that they represent.

    :param args: the values.
    """
    plain = tuple(arg.item() if isinstance(arg, np.generic) else arg for arg in args)
    digest = hashlib.md5(str(plain).encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % 2**31


@dataclass(frozen=True)
class Space(Mapping[str, Hparam]):
    """Hyperparameters by name, in a fixed order."""

    title: str  # for messages, such as "ERM on PACS, space 'recipe'"
    rows: tuple[Hparam, ...]

    def __getitem__(self, name: str) -> Hparam:
        return {row.name: row for row in self.rows}[name]

    def __iter__(self) -> Iterator[str]:
        return (row.name for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        width = max((len(name) for name in self), default=0)
        lines = [f"  {row.name:{width}}  {row.default:<8g}  {row.draw}" for row in self.rows]
        return "\n".join([self.title, *lines])

    def defaults(self) -> dict[str, float]:
        """Return the default of every hyperparameter."""
        return {row.name: row.default for row in self.rows}

    def draw(self, seed: int) -> dict[str, float]:
        """Draw a configuration. Each hyperparameter has its own random stream, named after it or its `stream`."""
        return {
            row.name: row.draw.draw(np.random.RandomState(seed_hash(seed, row.stream or row.name))) for row in self.rows
        }


def space_for(
    scope: str, dataset: str, algorithm: str, own: Sequence[Hparam | Like], space: str = DEFAULT_SPACE
) -> Space:
    """Return the hyperparameters of an algorithm on a dataset, in one of the search spaces.

    :param scope: the kind of dataset: "tabular", "small-image" or "image".
    :param dataset: name of the dataset.
    :param algorithm: name of the algorithm.
    :param own: the algorithm's own hyperparameters, which replace those of the dataset with the same name.
    :param space: "recipe" (settings that were found to work), "paper" (the paper's table, with DomainBed's rows for
        the baselines) or "domainbed" (DomainBed's code).
    """
    scope = scope_name(scope)
    if scope not in SCOPES:
        raise SandmaskError(f"{dataset}: unknown scope {scope!r}. {closest(scope, list(SCOPES))}")
    if space not in SPACES:
        raise SandmaskError(f"Unknown hyperparameter space {space!r}. {closest(space, list(SPACES))}")
    rows = {row.name: row for row in SHARED if row.applies(scope, dataset, space)}
    for row in own:
        if isinstance(row, Like):
            rows[row.name] = _alike(row, rows, algorithm)
        elif row.applies(scope, dataset, space):
            rows[row.name] = row
    return Space(f"{algorithm} on {dataset}, space {space!r}", tuple(rows.values()))


def _alike(row: Like, rows: Mapping[str, Hparam], algorithm: str) -> Hparam:
    if row.other not in rows:
        raise SandmaskError(
            f"Algorithm {algorithm}: hyperparameter {row.name!r} refers to {row.other!r}, which is not declared before "
            f"it. {closest(row.other, list(rows))}"
        )
    return replace(rows[row.other], name=row.name, stream=row.name)


def resolve(
    space: Space,
    hparams_seed: int = 0,
    trial_seed: int = 0,
    overrides: Mapping[str, str | float] | None = None,
) -> dict[str, float]:
    """Return the configuration of one run: the defaults or a draw, with overrides, which are checked.

    Draws are equal to DomainBed's with the same seeds.

    :param space: search space, from `space_for`.
    :param hparams_seed: number of the draw; 0 means the defaults.
    :param trial_seed: number of the repetition.
    :param overrides: values by name that replace drawn ones.
    :return: all values by name.
    """
    for name, seed in (("hparams_seed", hparams_seed), ("trial_seed", trial_seed)):
        if seed < 0:
            raise SandmaskError(f"{name} should be 0 or more. Found {seed}.")
    values = space.draw(seed_hash(hparams_seed, trial_seed)) if hparams_seed else space.defaults()
    problems = []
    settable = {row.name: row for row in (*OPTIONAL, *space.rows)}
    for name, value in (overrides or {}).items():
        if name not in settable:
            problems.append(f"Unknown hyperparameter {name!r} of {space.title}. {closest(name, list(settable))}")
            continue
        try:
            values[name] = settable[name].parse(value)
        except SandmaskError as error:
            problems.append(str(error))
    if problems:
        raise SandmaskError(" ".join(problems))
    return values


def parse_overrides(items: Sequence[str]) -> dict[str, str]:
    """Parse the values of `--hparam name=value` options.

    :param items: texts such as "lr=0.001".
    :return: texts of the values by name.
    """
    overrides: dict[str, str] = {}
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise SandmaskError(f"--hparam should look like name=value, such as lr=0.001. Found {item!r}.")
        if name in overrides:
            raise SandmaskError(f"--hparam {name} is given twice: {overrides[name]} and {value}. Keep one.")
        overrides[name] = value
    return overrides
