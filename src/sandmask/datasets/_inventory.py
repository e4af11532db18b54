"""Inventory of a dataset: examples by environment and class, and files that are not used."""

from collections import defaultdict
from dataclasses import dataclass

import torch

from sandmask._text import counted, printable
from sandmask.datasets._base import Dataset
from sandmask.datasets._images import ImageDataset
from sandmask.datasets._scan import LeftOut

MOST_CLASSES = 12  # that are counted one by one in words
SHOWN_FILES = 3  # left-out files that are named for each reason


@dataclass(frozen=True)
class Inventory:
    """Examples by environment and class, and what was left out of the dataset's folder."""

    name: str
    environments: tuple[str, ...]
    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # [environments][classes]
    left_out: tuple[LeftOut, ...]

    def lines(self) -> list[str]:
        """The inventory as text: a summary, one line per environment and one per reason to leave out files."""
        total = sum(map(sum, self.counts))
        sizes = f"{counted(len(self.environments), 'environment')}, {counted(len(self.classes), 'class')}"
        width = max(len(printable(name)) for name in self.environments)
        lines = [f"{printable(self.name)}: {counted(total, 'image')}, {sizes}"]
        for name, counts in zip(self.environments, self.counts, strict=True):
            lines.append(f"  {printable(name):<{width}}  {sum(counts):,}: {self._by_class(counts)}")
        by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for each in self.left_out:
            by_reason[each.reason].append(printable(each.path))
        for reason, paths in by_reason.items():
            more = ", ..." if len(paths) > SHOWN_FILES else ""
            lines.append(f"  left out {len(paths):,} ({printable(reason)}): {', '.join(paths[:SHOWN_FILES])}{more}")
        return lines

    def _by_class(self, counts: tuple[int, ...]) -> str:
        if len(counts) <= MOST_CLASSES:
            return ", ".join(f"{printable(name)} {count:,}" for name, count in zip(self.classes, counts, strict=True))
        return f"{min(counts):,} to {max(counts):,} per class"


def take_inventory(dataset: Dataset) -> Inventory:
    """Count the examples of a dataset by environment and class.

    :param dataset: the dataset.
    """
    parts = [dataset.labels[begin:end] for begin, end in zip(dataset.bounds, dataset.bounds[1:], strict=False)]
    counts = tuple(tuple(torch.bincount(part, minlength=len(dataset.classes)).tolist()) for part in parts)
    left_out = dataset.left_out if isinstance(dataset, ImageDataset) else ()
    return Inventory(dataset.name, dataset.environments, dataset.classes, counts, left_out)
