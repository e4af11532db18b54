"""The datasets as a user sees them: where each comes from and whether it is here."""

from dataclasses import dataclass
from pathlib import Path

from sandmask.datasets._base import DATASETS
from sandmask.datasets.sources import SOURCES


@dataclass(frozen=True)
class Overview:
    """One row of `sandmask data list`."""

    name: str
    description: str
    environments: tuple[str, ...]
    classes: int | None
    images: int | None  # where known
    generated: bool
    path: str | None  # where it lies; None if it is generated or not here
    expected_at: str | None


def overview(data_dir: Path) -> list[Overview]:
    """Every registered dataset, in the registry's order."""
    rows = []
    for entry in DATASETS.values():
        source = next((each for each in SOURCES.values() if entry.name in each.datasets), None)
        found = source.find(data_dir) if source is not None else None
        rows.append(
            Overview(
                name=entry.name,
                description=entry.description,
                environments=entry.environments,
                classes=entry.n_classes,
                images=sum(source.counts.values()) or None if source is not None else None,
                generated=source is None,
                path=str(found) if found is not None else None,
                expected_at=str(data_dir / source.folder) if source is not None else None,
            )
        )
    return rows
