"""Images that a table lists, one row each, instead of a tree of folders."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from sandmask.datasets._scan import ImageTree
from sandmask.datasets._walk import LeftOut
from sandmask.errors import SandmaskError

RANDOM, IN, OUT = -1, 0, 1  # how an example is split: at random by the trial's seed, or as the row says


class Row(NamedTuple):
    """An image, its class and its domain, and whether the table says how it is split."""

    path: str  # relative to the dataset's folder
    label: str
    domain: str
    split: int = RANDOM


@dataclass(frozen=True)
class Listed:
    """The rows of a table, in the order in which examples are numbered within a domain.

    `contents` holds the images by path if they are not files; `left_out` the rows that are not used; `domains` the
    order of the domains, if the table says it.
    """

    rows: Sequence[Row]
    contents: Mapping[str, bytes] | None = None
    left_out: tuple[LeftOut, ...] = ()
    domains: tuple[str, ...] = ()


def tree_of_rows(
    root: Path,
    listed: Listed,
    name: str,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    *,
    allow_missing_classes: bool = False,
) -> ImageTree:
    """The images that a table lists. Without `domains` (or `classes`), those of the rows in alphabetical order.

    :param root: the folder that the rows' paths are relative to.
    :param listed: the rows.
    :param name: what messages call the table.
    """
    rows = listed.rows
    domains = tuple(domains) or listed.domains or tuple(sorted({row.domain for row in rows}))
    classes = tuple(classes) or tuple(sorted({row.label for row in rows}))
    _check(rows, name, domains, classes, allow_missing_classes)
    place = {domain: number for number, domain in enumerate(domains)}
    label = {each: number for number, each in enumerate(classes)}
    ordered = sorted(rows, key=lambda row: place[row.domain])  # stable: within a domain, rows stay in order
    sizes = Counter(row.domain for row in rows)
    is_split = any(row.split != RANDOM for row in rows)
    return ImageTree(
        root,
        domains,
        classes,
        tuple(row.path for row in ordered),
        torch.tensor([label[row.label] for row in ordered]),
        tuple(torch.tensor([0, *(sizes[domain] for domain in domains)]).cumsum(0).tolist()),
        listed.left_out,
        torch.tensor([row.split for row in ordered]) if is_split else None,
        listed.contents,
    )


def _check(
    rows: Sequence[Row], name: str, domains: tuple[str, ...], classes: tuple[str, ...], allow_missing_classes: bool
) -> None:
    there = {(row.domain, row.label) for row in rows}
    for what, known, found in (
        ("domain", domains, {domain for domain, _ in there}),
        ("class", classes, {label for _, label in there}),
    ):
        if unknown := sorted(found - set(known)):
            raise SandmaskError(f"{name}: unknown {what} {unknown[0]!r}. There should be: {', '.join(known)}.")
    for domain in domains:
        missing = [label for label in classes if (domain, label) not in there]
        if len(missing) == len(classes):
            raise SandmaskError(f"{name} lists no images of the domain {domain!r}.")
        if missing and not allow_missing_classes:
            more = f" (and {len(missing) - 1} more classes)" if len(missing) > 1 else ""
            raise SandmaskError(
                f"{name}: the class {missing[0]!r} is missing in the domain {domain!r}{more}. Add images of it, or let "
                "it be with --missing-classes (in Python: allow_missing_classes=True)."
            )
