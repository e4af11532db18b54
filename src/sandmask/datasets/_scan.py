"""Find the images of a folder root/domain/class/*.jpg, always in the same order."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sandmask.datasets._location import find_folder
from sandmask.errors import SandmaskError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")


@dataclass(frozen=True)
class ImageTree:
    """Images numbered through: domain by domain, in it class by class, in it by file name."""

    root: Path
    domains: tuple[str, ...]  # folder names
    classes: tuple[str, ...]
    paths: tuple[str, ...]  # [N], relative to root
    labels: Tensor  # [N] int64
    bounds: tuple[int, ...]

    def path(self, index: int) -> Path:
        """The file of an image."""
        return self.root / self.paths[index]

    def without(self, dropped: Sequence[int]) -> "ImageTree":
        """The tree less some images, the others numbered through anew."""
        keep = torch.ones(len(self.paths), dtype=torch.bool)
        keep[torch.tensor(dropped, dtype=torch.int64)] = False
        kept_before = torch.cat([torch.zeros(1, dtype=torch.int64), keep.cumsum(0)])
        return replace(
            self,
            paths=tuple(path for path, kept in zip(self.paths, keep.tolist(), strict=True) if kept),
            labels=self.labels[keep],
            bounds=tuple(kept_before[list(self.bounds)].tolist()),
        )


def scan_images(
    root: Path,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    *,
    allow_missing_classes: bool = False,
) -> ImageTree:
    """The images under `root`. Without `domains` (or `classes`), every subfolder is one, in alphabetical
    order.

    A class that some domain has no image of is an error unless `allow_missing_classes`.
    """
    if not root.is_dir():
        raise SandmaskError(
            f"There is no folder {root}. It should hold one folder per domain, each with one per class."
        )
    folders = _domain_folders(root, domains)
    found = [_images_by_class(folder) for folder in folders]
    names = tuple(classes) or tuple(sorted({name for images in found for name in images}))
    paths: list[str] = []
    labels: list[int] = []
    bounds = [0]
    for folder, images in zip(folders, found, strict=True):
        _check_classes(folder, images, names, allow_missing_classes)
        for label, name in enumerate(names):
            files = images.get(name, [])
            paths.extend(f"{folder.name}/{file}" for file in files)
            labels.extend([label] * len(files))
        bounds.append(len(paths))
    domain_names = tuple(folder.name for folder in folders)
    return ImageTree(root, domain_names, names, tuple(paths), torch.tensor(labels), tuple(bounds))


def subfolders(folder: Path) -> list[Path]:
    """The visible subfolders, in alphabetical order."""
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith((".", "__")))


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


def _images_by_class(domain: Path) -> dict[str, list[str]]:
    """Class name -> images relative to the domain's folder, in alphabetical order; no empty classes."""
    images = {}
    for folder in subfolders(domain):
        files = [
            Path(where, name).relative_to(domain).as_posix()
            for where, _, names in os.walk(folder, followlinks=True)
            for name in names
            if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        ]
        if files:
            images[folder.name] = sorted(files)
    if not images:
        raise SandmaskError(
            f"The domain {domain} holds no images. Expected {domain / '<class>' / '*.jpg'}, or one of "
            f"{', '.join(SUFFIXES[1:])}."
        )
    return images


def _check_classes(
    domain: Path, images: dict[str, list[str]], names: tuple[str, ...], allow_missing_classes: bool
) -> None:
    unknown = [name for name in images if name not in names]
    if unknown:
        raise SandmaskError(f"{domain / unknown[0]} is no class of this dataset. Its classes: {', '.join(names)}.")
    missing = [name for name in names if name not in images]
    if missing and not allow_missing_classes:
        more = f" (and {len(missing) - 1} more classes)" if len(missing) > 1 else ""
        raise SandmaskError(
            f"{domain / missing[0]} holds no images: the class {missing[0]!r} is missing in the domain "
            f"{domain.name!r}{more}, though the dataset has it. Add the images, or let it be with "
            "--missing-classes (in Python: allow_missing_classes=True)."
        )
