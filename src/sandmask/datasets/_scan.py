"""Find the data folder, its subfolders and their files, in an order that does not depend on the file system."""

import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sandmask.errors import SandmaskError

HIDDEN = (".", "__")  # the names of hidden folders begin with these, such as .git and __MACOSX
DATA_VARIABLE = "SANDMASK_DATA"
SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff",
)  # fmt: skip


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that is not used, as a path relative to the dataset's folder, and the reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class Listing:
    """The files under a folder, as paths relative to it in alphabetical order, and those that are not used."""

    files: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


def list_files(root: Path, wanted: Callable[[str], bool] = lambda _: True) -> Listing:
    """List all visible files under `root`. `wanted` selects the folders directly in it by name.

    Links are followed, unless their target has been read already. Otherwise, a link to a folder above it would repeat
    images, and copies of an image could be in both the training and the validation split. A file or folder is preferred
    over a link to it.
    """
    walk = _Walk(root)
    walk.visit("", os.path.realpath(root), wanted)
    while walk.links:
        walk.follow(walk.links.popleft())
    return Listing(tuple(sorted(walk.files)), tuple(sorted(walk.left_out, key=lambda each: each.path)))


@dataclass
class _Walk:
    root: Path
    files: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    links: deque[str] = field(default_factory=deque)
    real: set[str] = field(default_factory=set)  # real paths of the files and folders that were read

    def visit(self, folder: str, real: str, wanted: Callable[[str], bool] = lambda _: True) -> None:
        """Read a folder and the folders in it. Links are collected, to be followed later."""
        waiting = [(folder, real)]
        while waiting:
            folder, real = waiting.pop()
            self.real.add(real)
            for entry in _entries(self.root / folder, real):
                path = f"{folder}/{entry.name}" if folder else entry.name
                if not folder and not wanted(entry.name):
                    continue
                if entry.name.startswith("."):
                    self.left_out.append(LeftOut(path, "hidden"))
                elif entry.is_symlink():
                    self.links.append(path)
                elif entry.is_dir():
                    if entry.name.startswith(HIDDEN):
                        self.left_out.append(LeftOut(path, "hidden"))
                    elif entry.path in self.real:
                        self.left_out.append(LeftOut(path, "read already through a link"))
                    else:
                        waiting.append((path, entry.path))
                else:
                    self._add(path, entry.path, is_file=entry.is_file())

    def follow(self, path: str) -> None:
        """Read what a link points to."""
        target = os.path.realpath(self.root / path)
        if not Path(target).exists():
            self.left_out.append(LeftOut(path, "broken link"))
        elif target in self.real:
            self.left_out.append(LeftOut(path, "link to something that is included already"))
        elif Path(target).is_dir():
            self.visit(path, target)
        else:
            self._add(path, target, is_file=Path(target).is_file())

    def _add(self, path: str, real: str, *, is_file: bool) -> None:
        if not is_file:  # reading a pipe would wait forever
            self.left_out.append(LeftOut(path, "not a regular file"))
        elif real in self.real:
            self.left_out.append(LeftOut(path, "read already through a link"))
        else:
            self.files.append(path)
            self.real.add(real)


def _entries(folder: Path, real: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(real) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise SandmaskError(f"{folder} cannot be read ({error.strerror}).") from error


def data_folder(data_dir: str | Path | None = None) -> Path:
    """Return the folder of the datasets.

    It is `data_dir` if given, otherwise $SANDMASK_DATA if set, otherwise ./data if it exists, and otherwise
    ~/.cache/sandmask/data.

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
    """Simplify a folder name for comparisons: "Real World" and "real_world" become "realworld"."""
    return "".join(letter for letter in name.lower() if letter not in " -_")


def find_folder(parent: Path, names: Iterable[str]) -> Path | None:
    """Return the subfolder with one of `names`. If there is none, case, spaces, hyphens and underscores are ignored."""
    if not parent.is_dir():
        return None
    wanted = list(names)
    for name in wanted:
        if (parent / name).is_dir():
            return parent / name
    loosely = {plain(name) for name in wanted}
    matching = (each for each in sorted(parent.iterdir()) if plain(each.name) in loosely and each.is_dir())
    return next(matching, None)


def is_image(path: str) -> bool:
    """Whether a file's name has the ending of an image."""
    return path.lower().endswith(SUFFIXES)


def subfolders(folder: Path) -> list[Path]:
    """Return the visible subfolders, in alphabetical order."""
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith(HIDDEN))
