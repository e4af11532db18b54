"""Find the images of a folder root/domain/class/*.jpg, always in the same order."""

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from sandmask.errors import SandmaskError

HIDDEN = (".", "__")  # how the names of hidden folders begin, such as .git and __MACOSX


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that is not used, relative to the dataset's folder, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Listing:
    """The files under `root`, as paths relative to it in alphabetical order, and what was passed over."""

    root: Path
    files: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


def list_files(root: Path, wanted: Callable[[str], bool] = lambda _: True) -> Listing:
    """All visible files under `root`; of the folders directly in it, the `wanted` ones.

    Links are followed, unless what they point to has been read: a link to a folder above itself would otherwise
    multiply its images, and copies of one image would be in the training and the test part. A file or folder itself
    is preferred over a link to it.
    """
    walk = _Walk(root)
    walk.visit("", os.path.realpath(root), wanted)
    while walk.links:
        walk.follow(walk.links.popleft())
    return Listing(root, tuple(sorted(walk.files)), tuple(sorted(walk.left_out, key=lambda each: each.path)))


@dataclass
class _Walk:
    root: Path
    files: dict[str, str] = field(default_factory=dict)  # relative path -> real path
    left_out: list[LeftOut] = field(default_factory=list)
    links: deque[str] = field(default_factory=deque)
    real: set[str] = field(default_factory=set)  # real paths of the files and folders that were read

    def visit(self, folder: str, real: str, wanted: Callable[[str], bool] = lambda _: True) -> None:
        """Read a folder and the real folders in it; its links are put aside for later."""
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
        if not is_file:  # a pipe would be waited for
            self.left_out.append(LeftOut(path, "not a regular file"))
        elif real in self.real:
            self.left_out.append(LeftOut(path, "read already through a link"))
        else:
            self.files[path] = real
            self.real.add(real)


def _entries(folder: Path, real: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(real) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise SandmaskError(f"{folder} cannot be read ({error.strerror}).") from error


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


SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff",
)  # fmt: skip

Images = dict[str, dict[str, list[str]]]  # domain -> class -> paths relative to the root


@dataclass(frozen=True)
class ImageTree:
    """Images numbered through: domain by domain, in a folder class by class, in it by file name."""

    root: Path
    domains: tuple[str, ...]  # folder names
    classes: tuple[str, ...]
    paths: tuple[str, ...]  # [N], relative to root
    labels: Tensor  # [N] int64
    bounds: tuple[int, ...]
    left_out: tuple[LeftOut, ...] = ()
    splits: Tensor | None = None  # [N], see `Dataset.splits`
    contents: Mapping[str, bytes] | None = None  # by path, if the images are not files

    def path(self, index: int) -> Path:
        """The file of an image, or what messages call it."""
        return self.root / self.paths[index]

    def content(self, index: int) -> bytes | None:
        """The bytes of an image that is not a file."""
        return None if self.contents is None else self.contents[self.paths[index]]

    def without(self, dropped: Sequence[int], reason: str = "dropped") -> "ImageTree":
        """The tree less some images, the others numbered through anew."""
        keep = torch.ones(len(self.paths), dtype=torch.bool)
        keep[torch.tensor(dropped, dtype=torch.int64)] = False
        kept_before = torch.cat([torch.zeros(1, dtype=torch.int64), keep.cumsum(0)])
        return replace(
            self,
            paths=tuple(path for path, kept in zip(self.paths, keep.tolist(), strict=True) if kept),
            labels=self.labels[keep],
            bounds=tuple(kept_before[list(self.bounds)].tolist()),
            left_out=(*self.left_out, *(LeftOut(self.paths[index], reason) for index in dropped)),
            splits=None if self.splits is None else self.splits[keep],
        )


def scan_images(
    root: Path,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    *,
    allow_missing_classes: bool = False,
    listing: Listing | None = None,
) -> ImageTree:
    """Find the images under a folder root/domain/class/.

    :param root: the folder.
    :param domains: names of the domain folders; all subfolders in alphabetical order if not given.
    :param classes: names of the class folders; all if not given.
    :param allow_missing_classes: accept domains that lack a class.
    :param listing: files under `root`, if they have been listed already.
    """
    if not root.is_dir():
        raise SandmaskError(
            f"There is no folder {root}. It should hold one folder per domain, each with one per class."
        )
    folders = _domain_folders(root, domains)
    chosen = {folder.name for folder in folders}
    if listing is None:
        listing = list_files(root, wanted=chosen.__contains__ if domains else lambda _: True)
    found, left_out = sort_images(listing)
    names = tuple(classes) or tuple(sorted({name for domain in chosen for name in found.get(domain, {})}))
    paths: list[str] = []
    labels: list[int] = []
    bounds = [0]
    for folder in folders:
        images = found.get(folder.name, {})
        _check_classes(folder, images, names, left_out, allow_missing_classes)
        for label, name in enumerate(names):
            files = images.get(name, [])
            paths.extend(files)
            labels.extend([label] * len(files))
        bounds.append(len(paths))
    domain_names = tuple(folder.name for folder in folders)
    return ImageTree(root, domain_names, names, tuple(paths), torch.tensor(labels), tuple(bounds), tuple(left_out))


def sort_images(listing: Listing) -> tuple[Images, list[LeftOut]]:
    """The images by domain and class, in alphabetical order, and all files that are not used."""
    images: Images = defaultdict(lambda: defaultdict(list))
    # Of hidden files, only images are reported.
    left_out = [each for each in listing.left_out if each.reason != "hidden" or is_image(each.path)]
    for path in listing.files:
        if not is_image(path):
            suffix = PurePosixPath(path).suffix.lower()
            left_out.append(LeftOut(path, f"unknown ending {suffix}" if suffix else "no ending"))
        elif path.count("/") < 2:
            left_out.append(LeftOut(path, "not in a folder of a domain and a class"))
        else:
            domain, name, _ = path.split("/", 2)
            images[domain][name].append(path)
    return images, left_out


def is_image(path: str) -> bool:
    """Whether a file's name ends like an image's."""
    return path.lower().endswith(SUFFIXES)


def subfolders(folder: Path) -> list[Path]:
    """The visible subfolders, in alphabetical order."""
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith(HIDDEN))


def _domain_folders(root: Path, domains: Sequence[str]) -> list[Path]:
    found = subfolders(root)
    if not domains:
        if not found:
            raise SandmaskError(f"{root} holds no folders. It should hold one per domain, each with one per class.")
        return found
    chosen = [find_folder(root, [domain]) for domain in domains]
    missing = [domain for domain, folder in zip(domains, chosen, strict=True) if folder is None]
    if missing:
        raise SandmaskError(
            f"{root / missing[0]} is missing: the folder of the domain {missing[0]!r}. "
            f"{root} holds: {', '.join(folder.name for folder in found) or 'no folders'}."
        )
    return [folder for folder in chosen if folder is not None]


def _check_classes(
    domain: Path,
    images: dict[str, list[str]],
    names: tuple[str, ...],
    left_out: list[LeftOut],
    allow_missing_classes: bool,
) -> None:
    if not images:
        raise SandmaskError(
            f"The domain {domain} holds no images. Expected {domain / '<class>' / '*.jpg'}, or one of "
            f"{', '.join(SUFFIXES[1:])}.{_what_was_left_out(left_out, domain.name)}"
        )
    unknown = [name for name in images if name not in names]
    if unknown:
        raise SandmaskError(f"{domain / unknown[0]} is not a class of this dataset. Its classes: {', '.join(names)}.")
    missing = [name for name in names if name not in images]
    if missing and not allow_missing_classes:
        more = f" (and {len(missing) - 1} more classes)" if len(missing) > 1 else ""
        raise SandmaskError(
            f"{domain / missing[0]} holds no images: the class {missing[0]!r} is missing in the domain "
            f"{domain.name!r}{more}, though the dataset has it. Add the images, or accept this with "
            "--missing-classes (in Python: allow_missing_classes=True)."
            + _what_was_left_out(left_out, f"{domain.name}/{missing[0]}")
        )


def _what_was_left_out(left_out: list[LeftOut], folder: str) -> str:
    """A sentence with an example of an unused file in a folder."""
    inside = [each for each in left_out if f"{each.path}/".startswith(f"{folder}/")]
    return f" Left out there: {inside[0].path} ({inside[0].reason})." if inside else ""
