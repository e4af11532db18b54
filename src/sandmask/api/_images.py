"""Lists of images, and a check that each can be decoded, before `sandmask.train` and `sandmask.sweep` train."""

from collections.abc import Iterable

from sandmask.api._progress import Screen, say_on
from sandmask.datasets import Dataset, ImageDataset, dataset_entry, load_dataset, take_inventory
from sandmask.functional.ranks import ALONE, Ranks
from sandmask.sweeps import Expansion, JobOptions


def allowances(*, skip_corrupt: bool, allow_missing_classes: bool) -> dict[str, bool]:
    """The options to load a dataset with that are turned on. Only datasets of images have these options."""
    given = {"skip_corrupt": skip_corrupt, "allow_missing_classes": allow_missing_classes}
    return {name: wanted for name, wanted in given.items() if wanted}


def announce(dataset: Dataset, screen: Screen) -> None:
    """Print how many images each environment and class has, and which files are not used."""
    if isinstance(dataset, ImageDataset) and screen != "none":
        for line in take_inventory(dataset).lines():
            say_on(screen, line)


def check_images(dataset: Dataset, screen: Screen, *, keep: bool, ranks: Ranks = ALONE) -> None:
    """Decode every image, with a bar in a terminal. A corrupt image is an error. Processes divide the images."""
    if not isinstance(dataset, ImageDataset):
        return
    among = slice(None) if ranks.size == 1 else ranks.share(len(dataset.labels))
    if screen != "terminal":
        dataset.check(keep=keep, among=among)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("reading images", total=None)
        dataset.check(lambda done, total: bars.update(task, completed=done, total=total), keep=keep, among=among)


def check_sources(expansion: Expansion, options: JobOptions, names: Iterable[str], screen: Screen) -> None:
    """Announce and check the image datasets of a sweep. Its workers load them again."""
    for name in dict.fromkeys(names):
        entry = dataset_entry(expansion.sources[name])
        if entry.scope == "image":
            dataset = load_dataset(entry, options.data_dir, **dict.fromkeys(options.allowances, True))
            announce(dataset, screen)
            check_images(dataset, screen, keep=False)
