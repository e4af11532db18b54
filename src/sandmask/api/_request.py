"""Which sweep is asked for: what the folder holds or a file says, with the arguments of the call over it."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandmask.errors import SandmaskError
from sandmask.sweeps import SweepFolder, SweepSpec, normalized, read_sweep

Names = str | int | Sequence[str | int | os.PathLike[str]]  # one name, several with commas between, or a list

_LISTS = ("datasets", "algorithms", "test_envs", "selection", "averages")


def requested_sweep(folder: SweepFolder, *, config: str | os.PathLike[str] | None = None, **given: Any) -> SweepSpec:
    """The sweep that is asked for.

    :param folder: the sweep's folder, which may hold an earlier request.
    :param config: TOML file with fields of `SweepSpec`.
    :param given: fields of `SweepSpec`; None is what was not mentioned.
    """
    fields: dict[str, Any] = {
        name: names(value) if name in _LISTS else value for name, value in given.items() if value is not None
    }
    stored = folder.asked()
    if config is None and stored is not None:
        return normalized(replace(stored, **fields))
    fields = {**(read_sweep(Path(config)) if config is not None else {}), **fields}
    for name in ("datasets", "algorithms"):
        if name not in fields:
            raise SandmaskError(f"{folder.path} holds no sweep yet: say which {name} with --{name} or --config.")
    return normalized(SweepSpec(**fields))


def names(value: Names) -> tuple[str, ...]:
    """The names in an argument: `"a,b"`, `["a", "b"]` and `["a,b"]` are the same."""
    items = [value] if isinstance(value, str | int) else value
    words = [word.strip() for item in items for word in str(item).split(",")]
    return tuple(word for word in words if word)
