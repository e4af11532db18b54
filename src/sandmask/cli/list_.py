"""`sandmask list`: the entries of the registries."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from sandmask.cli import _completion, _options
from sandmask.cli._console import print_json, print_table
from sandmask.errors import SandmaskError
from sandmask.plugins import load_plugins
from sandmask.registry import Registry, closest

Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A registry, and the columns of its table."""

    module: str
    registry: str
    columns: tuple[str, ...]

    def rows(self, pattern: str) -> list[Row]:
        """Every entry whose name matches the pattern, as plain JSON values."""
        registry: Registry[Any] = getattr(importlib.import_module(self.module), self.registry)
        return [_describe(entry) for name, entry in registry.items() if fnmatchcase(name.lower(), pattern.lower())]


KINDS = {
    "algorithms": Kind("sandmask.algorithms", "ALGORITHMS", ("name", "kind", "summary", "paper")),
    "datasets": Kind("sandmask.datasets", "DATASETS", ("name", "description", "environments", "network")),
    "rules": Kind("sandmask.selection", "RULES", ("name", "description")),
    "metrics": Kind("sandmask.records", "MEASURES", ("name", "title", "description")),
}
NETWORKS = "networks"
CHOICES = [*KINDS, NETWORKS]


def list_(
    what: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="One of: algorithms, datasets, rules, metrics, networks.",
            autocompletion=_completion.words(*CHOICES),
        ),
    ],
    search: Annotated[
        str | None,
        typer.Option(help="Only names that match this pattern, such as '*mask*'. For networks, it also searches timm."),
    ] = None,
    json: _options.JsonOption = False,
    plugin: _options.PluginOption = None,
) -> None:
    """List the available algorithms, datasets, selection rules, metrics or networks.

    [bold]Examples[/bold]

    sandmask list algorithms

    sandmask list datasets --json

    sandmask list networks --search 'vit_small*'

    sandmask list algorithms --plugin my_method.py
    """
    if what not in CHOICES:
        raise SandmaskError(f"Cannot list {what!r}. {closest(what, CHOICES)}")
    load_plugins(plugin)
    columns = ("name", "default of") if what == NETWORKS else KINDS[what].columns
    rows = _networks(search) if what == NETWORKS else KINDS[what].rows(search or "*")
    if not rows:
        raise SandmaskError(f"No {what} match {search!r}. A * matches any characters: 'resnet*', '*mask*'.")
    if json:
        print_json(rows)
        return
    print_table("", columns, [[_text(row.get(column)) for column in columns] for row in rows])
    if what == "algorithms":
        typer.echo("Methods of different kinds compose: SANDMask+VREx, SAM+CORAL, SAM+ANDMask+IRM.")
    if what == NETWORKS and search is None:
        typer.echo("All timm backbones can be used, by name. See: sandmask list networks --search 'resnet*'")


def _describe(entry: Any) -> Row:
    """The fields of a registry's entry, without functions. Hyperparameters are listed by name."""
    row: Row = {}
    for field in fields(entry):
        value = getattr(entry, field.name)
        if isinstance(value, list | tuple):
            names = [item.name for item in value if hasattr(item, "name")]
            row[field.name] = list(dict.fromkeys(names)) if names else list(value)
        elif value is None or isinstance(value, str | int | float):
            row[field.name] = value
    if hasattr(entry, "kind"):
        row["kind"] = entry.kind
    return row


def _text(value: Any) -> str:
    if value is None:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _networks(search: str | None) -> list[Row]:
    """The registered networks and the datasets' defaults; with `search`, pretrained networks of timm that match."""
    if search is None:
        from sandmask.datasets import DATASETS
        from sandmask.networks import NETWORKS

        users: dict[str, list[str]] = {name: [] for name in NETWORKS}
        for entry in DATASETS.values():
            users.setdefault(entry.network, []).append(entry.name)
        return [{"name": name, "default of": names} for name, names in users.items()]
    try:
        import timm
    except ImportError:
        raise SandmaskError("Backbones need timm. Install it with: pip install 'sandmask[vision]'") from None
    return [{"name": name, "default of": []} for name in timm.list_models(search, pretrained=True)]
