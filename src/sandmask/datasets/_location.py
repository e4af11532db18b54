"""The folder of the datasets on this machine."""

import os
from collections.abc import Iterable
from pathlib import Path

DATA_VARIABLE = "SANDMASK_DATA"


def data_folder(data_dir: str | Path | None = None) -> Path:
    """Return the folder of the datasets.

    It is `data_dir`, else $SANDMASK_DATA, else ./data if it exists, else ~/.cache/sandmask/data.

    :param data_dir: folder that takes precedence.
    """
    if data_dir is not None:
        return Path(data_dir).expanduser()
    named = os.environ.get(DATA_VARIABLE)
    if named:
        return Path(named).expanduser()
    local = Path("data")
    return local if local.is_dir() else Path.home() / ".cache" / "sandmask" / "data"


def plain(name: str) -> str:
    """A folder name without case, spaces, hyphens and underscores: what "Real World" and "real_world"
    share.
    """
    return "".join(letter for letter in name.lower() if letter not in " -_")


def find_folder(parent: Path, names: Iterable[str]) -> Path | None:
    """The subfolder that has one of `names`: exactly, or else up to case, spaces and underscores."""
    if not parent.is_dir():
        return None
    wanted = list(names)
    for name in wanted:
        if (parent / name).is_dir():
            return parent / name
    loosely = {plain(name) for name in wanted}
    matching = (each for each in sorted(parent.iterdir()) if plain(each.name) in loosely and each.is_dir())
    return next(matching, None)
