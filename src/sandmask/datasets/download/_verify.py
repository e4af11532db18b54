"""Check datasets on the disk."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from sandmask._files import lock, replacing
from sandmask.datasets._base import take_inventory
from sandmask.datasets._images import ImageDataset
from sandmask.datasets._lookup import dataset_entry, load_dataset
from sandmask.datasets._store import ImageStore
from sandmask.datasets._tree import ImageTree
from sandmask.datasets.download._http import writing
from sandmask.datasets.mnist import CONTENT_MD5, read_content
from sandmask.datasets.sources import Source
from sandmask.errors import SandmaskError

NAME = "sandmask-data.json"
LOCK = ".sandmask-data.lock"
CHECKED_SIZE = 32  # side to which images are resized when they are decoded as a check


@dataclass(frozen=True)
class Verification:
    """The result of a check: `status` is "ok", "wrong" (see `problems`) or "missing"."""

    name: str
    path: str | None
    status: Literal["ok", "wrong", "missing"]
    counts: dict[str, int]  # number of images by domain
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def verify(source: Source, data_dir: Path, *, contents: bool = False) -> Verification:
    """Check the domains, classes and counts of a dataset, and compare its files with the record of the first check.

    The files of MNIST are always compared with the published checksums.

    :param source: source of the dataset.
    :param data_dir: folder of the datasets.
    :param contents: also decode every image and compare the contents of files.
    """
    path = source.find(data_dir)
    if path is None:
        return Verification(source.name, None, "missing", {}, (f"{data_dir / source.folder} is not there",))
    counts: dict[str, int] = {}
    notes: list[str] = []
    if source.images is None:
        problems = list(_mnist_problems(path))
    else:
        try:
            tree = source.images.scan(data_dir)
        except SandmaskError as error:
            return Verification(source.name, str(path), "wrong", {}, (str(error),))
        ends = zip(tree.domains, tree.bounds, tree.bounds[1:], strict=False)
        counts = {domain: end - begin for domain, begin, end in ends}
        problems = [
            f"{domain} has {found:,} images, and {source.name} has {expected:,} there"
            for (domain, found), expected in zip(counts.items(), source.counts.values(), strict=False)
            if found != expected
        ]
        if contents:
            problems += [str(error) for _, error in ImageStore(tree, CHECKED_SIZE, cache="none").corrupt()]
        try:
            for kind in ("listing", "contents") if contents else ("listing",):
                found = _digest(tree, with_contents=kind == "contents")
                _compare(source, kind, found, Ledger(data_dir), problems, notes)
        except OSError as error:  # such as a file that a table lists and that is not there
            problems.append(f"{error.filename} cannot be read: {error.strerror}")
    status: Literal["ok", "wrong"] = "wrong" if problems else "ok"
    return Verification(source.name, str(path), status, counts, tuple(problems), tuple(notes))


def verify_own(source: str, *, contents: bool = False, allow_missing_classes: bool = False) -> Verification:
    """Check your own data. Every domain should have every class, and all images should be decodable.

    :param source: folder of images, manifest, .npz file, or Hugging Face dataset.
    :param contents: whether to decode images.
    :param allow_missing_classes: whether domains may lack some of the classes.
    """
    options: dict[str, Any] = {"allow_missing_classes": True} if allow_missing_classes else {}
    try:
        entry = dataset_entry(source)
        dataset = load_dataset(entry, **({"cache": "none"} if entry.scope == "image" else {}), **options)
        if contents and isinstance(dataset, ImageDataset):
            dataset.check(keep=False)
    except SandmaskError as error:
        return Verification(source, source, "wrong", {}, (str(error),))
    inventory = take_inventory(dataset)
    counts = {name: sum(each) for name, each in zip(inventory.environments, inventory.counts, strict=True)}
    return Verification(dataset.name, source, "ok", counts, notes=tuple(line.strip() for line in inventory.lines()[1:]))


def _mnist_problems(folder: Path) -> Iterator[str]:
    for name in CONTENT_MD5:
        try:
            read_content(folder, name)
        except SandmaskError as error:
            yield str(error)


class Ledger:
    """A JSON file in the data folder, {section: {key: facts}}. Every change is written immediately and atomically."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / NAME

    def get(self, section: str, key: str) -> dict[str, Any] | None:
        """Return the facts under `key`, or None."""
        facts: dict[str, Any] | None = self._read().get(section, {}).get(key)
        return facts

    def record(self, section: str, key: str, facts: dict[str, Any]) -> None:
        """Add facts to those under `key`."""
        content = self._read()
        entries = content.setdefault(section, {})
        entries[key] = {**entries.get(key, {}), **facts}
        self._write(content)

    def forget(self, section: str, key: str) -> None:
        """Remove the facts under `key`."""
        content = self._read()
        if content.get(section, {}).pop(key, None) is not None:
            self._write(content)

    def _read(self) -> dict[str, dict[str, dict[str, Any]]]:
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SandmaskError(f"{self.path} cannot be read ({error}). Fix or delete it.") from error
        if not isinstance(content, dict):
            raise SandmaskError(f"{self.path} should hold a JSON object. Fix or delete it.")
        return content

    def _write(self, content: dict[str, dict[str, dict[str, Any]]]) -> None:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary:
                temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def sole_user(data_dir: Path) -> Iterator[None]:
    """Hold the data folder's lock, so that two downloads do not write the same files."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        file = FileIO(data_dir / LOCK, "a")
    except OSError as error:
        raise SandmaskError(f"{data_dir} cannot be written to ({error.strerror}).") from error
    with file:
        taken = False
        with suppress(SandmaskError):  # file systems without locks: downloads are possible, but not protected
            taken = not lock(file)
        if taken:
            raise SandmaskError(f"Another `sandmask data` command is working in {data_dir}. Wait for it to finish.")
        yield


def _compare(source: Source, kind: str, found: str, ledger: Ledger, problems: list[str], notes: list[str]) -> None:
    """Compare a hash with the record. If there is none and the data has no problems, record the hash."""
    seen = (ledger.get("folders", source.folder) or {}).get(kind)
    what = "names and sizes of the files" if kind == "listing" else "contents of the files"
    if seen is None and not problems:
        try:
            ledger.record("folders", source.folder, {kind: found})
        except SandmaskError as error:  # the folder may belong to another user
            notes.append(f"{what} not recorded: {error}")
        else:
            notes.append(f"{what} recorded in {ledger.path}: seen for the first time")
    elif seen is not None and seen != found:
        problems.append(
            f"{what} are not those that were first seen (if you changed them on purpose, remove the entry "
            f"{source.folder!r} from {ledger.path})"
        )


def _digest(tree: ImageTree, *, with_contents: bool) -> str:
    total = hashlib.sha256()
    for index, name in enumerate(tree.paths):
        path = tree.path(index)
        total.update(f"{name}\0{path.stat().st_size}\n".encode())
        if with_contents:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
