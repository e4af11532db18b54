"""Find files and folders anywhere in an extracted archive, and move them out."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from sandmask.datasets._location import find_folder
from sandmask.datasets._scan import subfolders
from sandmask.errors import SandmaskError

DEPTH = 4  # archives nest their content at most this deep


def move_domains(extracted: Path, target: Path, domains: Sequence[str]) -> str:
    """Move each domain's folder to target/domain. Mirrors wrap them in differently named folders."""
    target.mkdir(parents=True, exist_ok=True)
    for domain in domains:
        candidates = (find_folder(folder, [domain]) for folder in _folders(extracted, DEPTH))
        found = next((folder for folder in candidates if folder is not None and subfolders(folder)), None)
        if found is None:
            raise SandmaskError(
                f"The archive holds no folder {domain!r} with one folder per class: it is not the dataset, "
                "or its layout has changed."
            )
        found.rename(target / domain)
    return f"{len(domains)} domains"


def move_files(extracted: Path, target: Path, names: Sequence[str]) -> str:
    """Move the files with these names to `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        (extracted / name).rename(target / name)
    return f"{len(names)} files"


def move_folder(extracted: Path, target: Path, marker: str) -> str:
    """Move the folder that has a file or folder named `marker`, with all in it."""
    found = next((folder for folder in _folders(extracted, DEPTH) if (folder / marker).exists()), None)
    if found is None:
        raise SandmaskError(f"The archive holds no {marker!r}: it is not the dataset, or its layout has changed.")
    found.rename(target)
    return "as in the archive"


def _folders(root: Path, depth: int) -> Iterator[Path]:
    """`root` and the folders under it, the shallow ones first."""
    level = [root]
    for _ in range(depth):
        yield from level
        level = [child for folder in level for child in subfolders(folder)]
