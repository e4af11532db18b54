"""Hyperparameters as objects with names, defaults and distributions.

    space = space_for("image", "PACS", "ANDMask", [Hparam("tau", 1.0, Uniform(0, 1))])
    print(space)                             # the table: name, default, distribution
    resolve(space)                           # the defaults
    resolve(space, hparams_seed=7)           # a draw, the same as DomainBed's with this seed
    resolve(space, overrides={"lr": 1e-4})   # with a value set by hand

An algorithm declares only its own hyperparameters. Learning rate, batch size and others come from the dataset.
"""

from sandmask.hparams._hparam import (
    ANY,
    BELOW_ONE,
    COUNT,
    DEFAULT_SPACE,
    DEPTH,
    FRACTION,
    NON_NEGATIVE,
    POSITIVE,
    SCOPES,
    SPACES,
    Bounds,
    Choice,
    Constant,
    Distribution,
    Hparam,
    IntLogUniform,
    IntUniform,
    Like,
    LogUniform,
    Scope,
    SpaceName,
    Uniform,
)
from sandmask.hparams._shared import OPTIONAL, SHARED
from sandmask.hparams._space import Space, parse_overrides, resolve, seed_hash, space_for

__all__ = [
    "ANY",
    "BELOW_ONE",
    "COUNT",
    "DEFAULT_SPACE",
    "DEPTH",
    "FRACTION",
    "NON_NEGATIVE",
    "OPTIONAL",
    "POSITIVE",
    "SCOPES",
    "SHARED",
    "SPACES",
    "Bounds",
    "Choice",
    "Constant",
    "Distribution",
    "Hparam",
    "IntLogUniform",
    "IntUniform",
    "Like",
    "LogUniform",
    "Scope",
    "Space",
    "SpaceName",
    "Uniform",
    "parse_overrides",
    "resolve",
    "seed_hash",
    "space_for",
]
