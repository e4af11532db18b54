"""The images of a dataset by index, from folders root/domain/class or from the rows of a table."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from torch import Tensor

from sandmask._text import counted
from sandmask.datasets._scan import SUFFIXES, LeftOut, Listing, find_folder, is_image, list_files, subfolders
from sandmask.errors import SandmaskError

RANDOM, IN, OUT = -1, 0, 1  # the split of an example; RANDOM depends on the trial's seed


class Row(NamedTuple):
    """An image with its class, domain and split."""

    path: str  # relative to the dataset's folder
    label: str
    domain: str
    split: int = RANDOM


@dataclass(frozen=True)
class Listed:
    """The rows of a table, in the order in which examples are numbered within a domain.

    `read` reads an image by its path, if images are not files. `left_out` has the rows that are not used. `domains` is
    the order of the domains, if the table defines one.
    """

    rows: Sequence[Row]
    read: Callable[[str], bytes] | None = None
    left_out: tuple[LeftOut, ...] = ()
    domains: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImageTree:
    """The images of a dataset, ordered by domain, and in folders also by class and file name."""

    root: Path
    domains: tuple[str, ...]  # folder names
    classes: tuple[str, ...]
    paths: tuple[str, ...]  # [N], relative to root
    labels: Tensor  # [N] int64
    bounds: tuple[int, ...]
    left_out: tuple[LeftOut, ...] = ()
    splits: Tensor | None = None  # [N], see `Dataset.splits`
    read: Callable[[str], bytes] | None = None  # reads an image by its path, if images are not files

    def path(self, index: int) -> Path:
        """Return the path of an image. If it is not a file, the path is only used in messages."""
        return self.root / self.paths[index]

    def content(self, index: int) -> bytes | None:
        """Return the bytes of an image that is not a file, or None for a file."""
        return None if self.read is None else self.read(self.paths[index])

    def without(self, dropped: Sequence[int], reason: str = "dropped") -> "ImageTree":
        """Return a tree without some images. The others have new indices."""
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
    :param domains: names of the domain folders; if not given, all subfolders in alphabetical order.
    :param classes: names of the class folders; if not given, all in alphabetical order.
    :param allow_missing_classes: accept domains that lack a class.
    :param listing: files under `root`, if they have been listed already.
    """
    folders = domain_folders(root, domains)
    chosen = set(folders)
    if listing is None:
        listing = list_files(root, wanted=chosen.__contains__ if domains else lambda _: True)
    found, left_out = sort_images(listing)
    rows = [row for row in found if row.domain in chosen]
    filled = {row.domain for row in rows}
    for domain in folders:
        if domain not in filled:
            raise SandmaskError(
                f"The domain {root / domain} holds no images. Expected {root / domain / '<class>' / '*.jpg'}, or one "
                f"of {', '.join(SUFFIXES[1:])}.{_example(left_out, domain)}"
            )
    classes = tuple(classes) or tuple(sorted({row.label for row in rows}))
    place = {name: number for number, name in enumerate(classes)}
    rows.sort(key=lambda row: place.get(row.label, -1))  # stable, so files of a class stay in alphabetical order
    listed = Listed(rows, left_out=tuple(left_out))
    return tree_of_rows(root, listed, root, folders, classes, allow_missing_classes=allow_missing_classes)


def sort_images(listing: Listing) -> tuple[list[Row], list[LeftOut]]:
    """Return the images in folders domain/class, in alphabetical order, and all files that are not used."""
    rows: list[Row] = []
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
            rows.append(Row(path, name, domain))
    return rows, left_out


def tree_of_rows(
    root: Path,
    listed: Listed,
    name: str | Path,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    *,
    allow_missing_classes: bool = False,
) -> ImageTree:
    """Return the images that the rows of a table list.

    :param root: the folder that the rows' paths are relative to.
    :param listed: the rows.
    :param name: the name of the table in messages.
    :param domains: names of the domains; if not given, those of the rows, in the table's or in alphabetical order.
    :param classes: names of the classes; if not given, those of the rows, in alphabetical order.
    :param allow_missing_classes: accept domains that lack a class.
    """
    domains = tuple(domains) or listed.domains or tuple(sorted({row.domain for row in listed.rows}))
    classes = tuple(classes) or tuple(sorted({row.label for row in listed.rows}))
    _check(listed, Path(name), domains, classes, allow_missing_classes)
    place = {domain: number for number, domain in enumerate(domains)}
    label = {each: number for number, each in enumerate(classes)}
    rows = sorted(listed.rows, key=lambda row: place[row.domain])  # stable, so rows of a domain stay in order
    sizes = Counter(row.domain for row in rows)
    is_split = any(row.split != RANDOM for row in rows)
    return ImageTree(
        root,
        domains,
        classes,
        tuple(row.path for row in rows),
        torch.tensor([label[row.label] for row in rows]),
        tuple(torch.tensor([0, *(sizes[domain] for domain in domains)]).cumsum(0).tolist()),
        listed.left_out,
        torch.tensor([row.split for row in rows]) if is_split else None,
        listed.read,
    )


def domain_folders(root: Path, domains: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the folders of `domains`; if not given, of all subfolders in alphabetical order."""
    if not root.is_dir():
        raise SandmaskError(
            f"There is no folder {root}. It should hold one folder per domain, each with one folder per class."
        )
    there = tuple(folder.name for folder in subfolders(root))
    if not domains:
        if not there:
            raise SandmaskError(f"{root} holds no folders. It should hold one per domain, each with one per class.")
        return there
    chosen = []
    for domain in domains:
        folder = find_folder(root, [domain])
        if folder is None:
            raise SandmaskError(
                f"{root / domain} is missing, which is the folder of the domain {domain!r}. "
                f"{root} holds: {', '.join(there) or 'no folders'}."
            )
        chosen.append(folder.name)
    return tuple(chosen)


def _check(
    listed: Listed, name: Path, domains: tuple[str, ...], classes: tuple[str, ...], allow_missing_classes: bool
) -> None:
    """Raise an error if rows have other domains or classes, or if a domain or class has no rows."""
    there = {(row.domain, row.label) for row in listed.rows}
    for domain, label in sorted(there):
        if domain not in domains:
            raise SandmaskError(f"{name}: unknown domain {domain!r}. Its domains: {', '.join(domains)}.")
        if label not in classes:
            raise SandmaskError(
                f"{name / domain / label} is not a class of this dataset. Its classes: {', '.join(classes)}."
            )
    for domain in domains:
        missing = [label for label in classes if (domain, label) not in there]
        if len(missing) == len(classes):
            raise SandmaskError(f"{name} has no images of the domain {domain!r}.")
        if missing and not allow_missing_classes:
            more = f" (and {counted(len(missing) - 1, 'other class')})" if len(missing) > 1 else ""
            raise SandmaskError(
                f"{name / domain / missing[0]} holds no images: the class {missing[0]!r} is missing in the domain "
                f"{domain!r}{more}, but the dataset has it. Add the images, or accept this with --missing-classes "
                f"(in Python: allow_missing_classes=True).{_example(listed.left_out, f'{domain}/{missing[0]}')}"
            )


def _example(left_out: Sequence[LeftOut], folder: str) -> str:
    """Return a sentence with an example of an unused file in a folder."""
    inside = [each for each in left_out if f"{each.path}/".startswith(f"{folder}/")]
    return f" Left out there: {inside[0].path} ({inside[0].reason})." if inside else ""
