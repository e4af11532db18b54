"""What tables need to know of the benchmark's datasets, and records do not say: their order and their environments.

The datasets themselves say it too, but to ask them takes torch. A test compares the two.
"""

# By dataset, in the order of tables: the environments that the benchmark holds out. Spirals has one more.
HELD_OUT: dict[str, tuple[str, ...]] = {
    "Spirals": tuple(map(str, range(16))),
    "ColoredMNIST": ("+90%", "+80%", "-90%"),
    "RotatedMNIST": ("0", "15", "30", "45", "60", "75"),
    "VLCS": ("C", "L", "S", "V"),
    "PACS": ("A", "C", "P", "S"),
    "OfficeHome": ("A", "C", "P", "R"),
    "TerraIncognita": ("L100", "L38", "L43", "L46"),
    "DomainNet": ("clip", "info", "paint", "quick", "real", "sketch"),
}


def held_out_environments(dataset: str) -> tuple[str, ...]:
    """The environments that the benchmark holds out, one after the other; empty for a dataset that is not part of it.

    `Spirals:seed=1` has the environments of Spirals.
    """
    return HELD_OUT.get(dataset.partition(":")[0], ())


def dataset_order(names: list[str]) -> list[str]:
    """The benchmark's datasets in its order, then others in alphabetical order."""
    places = {name: place for place, name in enumerate(HELD_OUT)}
    return sorted(names, key=lambda name: (places.get(name, len(places)), name))
