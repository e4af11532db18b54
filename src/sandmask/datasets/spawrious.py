"""Spawrious: dogs at places that correlate with breeds, differently in training and test (Lynch et al., 2023).

The archive has folders number/place/breed. The three environments of a mixture are taken from them:

- One to one (O2O): each breed has its own place. Training environment k shows 97% (k = 1) or 87% (k = 2) of the images
  of a breed at its place, and the others at a place that all breeds share. Its images are from folder k - 1. In the
  test, breeds have other places, and the images are from both folders.
- Many to many (M2M): each pair of breeds shares two places. Training environment 2 swaps the places of environment 1
  within each pair. The test has other places for each pair, in both orders. All images are from folder 0.

If some images of a folder are used, they are the first ones by name. DomainBed uses the first ones in the order of the
disk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandmask.datasets._scan import is_image
from sandmask.datasets._tree import Listed, Row
from sandmask.datasets.image_sets import ImageSet
from sandmask.errors import SandmaskError

BREEDS = ("bulldog", "dachshund", "labrador", "corgi")  # in the order of the places of a mixture
PLACES = ("beach", "desert", "dirt", "jungle", "mountain", "snow")
ENVIRONMENTS = ("Test", "SC_group_1", "SC_group_2")
SHARES = (0.97, 0.87)  # O2O: share of the images at the breed's own place, by training environment
SWAPPED = (1, 0, 3, 2)  # M2M: the breed whose place each breed has if places are swapped
SOURCE, FOLDER = "Spawrious", "spawrious224"  # names of the source and its folder
LAYOUT = "0/ and 1/, each with one folder per place and in it one per breed"
PER_FOLDER = 3168  # number of images of each breed at each place

Four = tuple[str, str, str, str]


@dataclass(frozen=True)
class Mixture:
    """One of the six datasets: the places of the four breeds in training and in the test."""

    name: str
    train: Four
    test: Four
    filler: str | None = None  # O2O: the place that all breeds share

    def rows(self, root: Path) -> Listed:
        """Return the images of the three environments."""
        return Listed([*(self._one_to_one(root) if self.filler else self._many_to_many(root))])

    def _one_to_one(self, root: Path) -> Iterator[Row]:
        assert self.filler is not None
        for folder, share in enumerate(SHARES):
            environment = ENVIRONMENTS[1 + folder]
            for breed, place in zip(BREEDS, self.train, strict=True):
                own, shared = files(root, folder, place, breed), files(root, folder, self.filler, breed)
                own_count, shared_count = (int(share * len(found)) for found in (own, shared))
                chosen = [*own[:own_count], *shared[: len(shared) - shared_count]]
                yield from (Row(path, breed, environment) for path in chosen)
            for breed, place in zip(BREEDS, self.test, strict=True):
                yield from (Row(path, breed, ENVIRONMENTS[0]) for path in files(root, folder, place, breed))

    def _many_to_many(self, root: Path) -> Iterator[Row]:
        for mixture, order in enumerate((range(4), SWAPPED)):
            for breed, whose in zip(BREEDS, order, strict=True):
                for environment, places in ((ENVIRONMENTS[1 + mixture], self.train), (ENVIRONMENTS[0], self.test)):
                    yield from (Row(path, breed, environment) for path in files(root, 0, places[whose], breed))

    def images(self) -> ImageSet:
        """Return the mixture as an image dataset. Tables report only the environment Test."""
        how = "each with its own background" if self.filler else "in pairs that share backgrounds"
        return ImageSet(
            name=self.name,
            folder=FOLDER,
            environments=ENVIRONMENTS,
            domains=ENVIRONMENTS,
            description=f"Four breeds of dogs, {how} ({self.name.partition('_')[2]})",
            n_classes=len(BREEDS),
            classes=tuple(sorted(BREEDS)),
            table=self.rows,
            layout=LAYOUT,
            source=SOURCE,
            checkpoint_every=100,
            report_envs=(0,),
        )


def files(root: Path, folder: int, place: str, breed: str) -> list[str]:
    """Return the images of a breed at a place, ordered by name."""
    where = root / str(folder) / place / breed
    if not where.is_dir():
        raise SandmaskError(f"{where} is missing. It should have the images of a {breed} at the place {place!r}.")
    return sorted(f"{folder}/{place}/{breed}/{path.name}" for path in where.iterdir() if is_image(path.name))


def all_rows(root: Path) -> Listed:
    """Return all images of the archive, with folder and place as their domain, for `sandmask data verify`."""
    found = [
        Row(path, breed, f"{folder}/{place}")
        for folder in (0, 1)
        for place in PLACES
        for breed in BREEDS
        for path in files(root, folder, place, breed)
    ]
    return Listed(found)


FOLDERS = tuple(f"{folder}/{place}" for folder in (0, 1) for place in PLACES)
SPAWRIOUS = ImageSet(SOURCE, FOLDER, FOLDERS, FOLDERS, n_classes=len(BREEDS), table=all_rows, layout=LAYOUT)
MIXTURES = (
    Mixture("SpawriousO2O_easy", ("desert", "jungle", "dirt", "snow"), ("dirt", "snow", "desert", "jungle"), "beach"),
    Mixture(
        "SpawriousO2O_medium", ("mountain", "beach", "dirt", "jungle"), ("jungle", "dirt", "beach", "snow"), "desert"
    ),
    Mixture(
        "SpawriousO2O_hard", ("jungle", "mountain", "snow", "desert"), ("mountain", "snow", "desert", "jungle"), "beach"
    ),
    Mixture("SpawriousM2M_easy", ("desert", "mountain", "dirt", "jungle"), ("dirt", "jungle", "mountain", "desert")),
    Mixture("SpawriousM2M_medium", ("beach", "snow", "mountain", "desert"), ("desert", "mountain", "beach", "snow")),
    Mixture("SpawriousM2M_hard", ("dirt", "jungle", "snow", "beach"), ("snow", "beach", "dirt", "jungle")),
)
