"""What a dataset of images holds, said before training; and all its images decoded, so that training does not fail."""

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from sandmask.datasets import Dataset
    from sandmask.sweeps import Expansion, JobOptions


def announce(dataset: "Dataset", say: Callable[[str], object]) -> None:
    """Say how many images there are of each environment and class, and which files are not used."""
    from sandmask.datasets import ImageDataset, take_inventory

    if isinstance(dataset, ImageDataset):
        for line in take_inventory(dataset).lines():
            say(line)


def check_images(dataset: "Dataset", *, keep: bool, quiet: bool = False) -> None:
    """Decode every image, with a bar in a terminal; corrupt ones are an error."""
    from rich.console import Console
    from rich.progress import Progress

    from sandmask.datasets import ImageDataset

    if not isinstance(dataset, ImageDataset):
        return
    if quiet or not sys.stderr.isatty():
        dataset.check(keep=keep)
        return
    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("reading images", total=None)
        dataset.check(lambda done, total: bars.update(task, completed=done, total=total), keep=keep)


def announce_sources(expansion: "Expansion", options: "JobOptions", names: Iterable[str], *, quiet: bool) -> None:
    """The same for those datasets of a sweep that are images. Its workers load them for themselves."""
    from sandmask.datasets import dataset_entry, load_dataset

    for name in dict.fromkeys(names):
        entry = dataset_entry(expansion.sources[name])
        if entry.scope == "image":
            dataset = load_dataset(entry, options.data_dir, **dict.fromkeys(options.allowances, True))
            announce(dataset, lambda line: None if quiet else typer.echo(line, err=True))
            check_images(dataset, keep=False, quiet=quiet)
