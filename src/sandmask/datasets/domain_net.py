"""DomainNet: 345 kinds of objects in six styles (Peng et al., "Moment matching", ICCV 2019).

The published archives hold some images several times. DomainBed removes them by a list of names; `prepare`
finds them by content: of files in one class folder with the same bytes, the first by name stays.
"""

import hashlib
from collections import defaultdict
from pathlib import Path

from sandmask.datasets._image_set import ImageSet
from sandmask.datasets._relocate import move_domains
from sandmask.datasets._scan import subfolders

DOMAIN_NET_IMAGES = ImageSet(
    name="DomainNet",
    folder="domain_net",
    environments=("clip", "info", "paint", "quick", "real", "sketch"),
    domains=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    n_classes=345,
)
DOMAIN_NET = DOMAIN_NET_IMAGES.entry("345 kinds of objects in six styles", checkpoint_every=1000)


def prepare(extracted: Path, target: Path) -> str:
    """Gather the six domains in `target` and remove duplicates; say how many."""
    move_domains(extracted, target, DOMAIN_NET_IMAGES.domains)
    duplicates = [path for domain in subfolders(target) for kind in subfolders(domain) for path in repeated(kind)]
    for path in duplicates:
        path.unlink()
    return f"{len(duplicates)} duplicate images removed"


def repeated(folder: Path) -> list[Path]:
    """Files whose bytes an earlier file (by name) of the same folder has already."""
    by_size = defaultdict(list)  # only files of the same size need to be read
    for path in sorted(folder.iterdir()):
        if path.is_file():
            by_size[path.stat().st_size].append(path)
    found = []
    for paths in by_size.values():
        seen: set[bytes] = set()
        for path in paths if len(paths) > 1 else ():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
            if digest in seen:
                found.append(path)
            seen.add(digest)
    return sorted(found)
