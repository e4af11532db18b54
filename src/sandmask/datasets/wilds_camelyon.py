"""WILDSCamelyon: tumors in lymph nodes from five hospitals (Bandi et al., 2018), as in WILDS (Koh et al., ICML 2021).

The folder is the one that the package `wilds` downloads: `metadata.csv` lists the patches. Each hospital (`center`) is
an environment, as in DomainBed, and its patches are numbered in the order of that file.
"""

from pathlib import Path

from sandmask.datasets._image_set import ImageSet
from sandmask.datasets._rows import Listed, Row
from sandmask.datasets._table import Table

COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center")
CLASSES = ("normal", "tumor")
HOSPITALS = tuple(f"hospital_{number}" for number in range(5))
COUNTS = dict(zip(HOSPITALS, (59_436, 34_904, 85_054, 129_838, 146_722), strict=True))


def read_metadata(folder: Path) -> Listed:
    """The patches that `metadata.csv` lists."""
    table = Table(folder / "metadata.csv")
    table.need(COLUMNS)
    rows = []
    for number, (patient, node, x, y, tumor, center) in table.rows(COLUMNS):
        if tumor not in ("0", "1"):
            raise table.error(number, f"tumor should be 0 or 1, and is {tumor!r}")
        slide = f"patient_{patient.zfill(3)}_node_{node}"
        path = f"patches/{slide}/patch_{slide}_x_{x}_y_{y}.png"
        rows.append(Row(path, CLASSES[int(tumor)], f"hospital_{center}"))
    return Listed(rows)


WILDS_CAMELYON_IMAGES = ImageSet(
    name="WILDSCamelyon",
    folder="camelyon17_v1.0",
    environments=HOSPITALS,
    domains=HOSPITALS,
    n_classes=len(CLASSES),
    classes=CLASSES,
    table=read_metadata,
    layout="metadata.csv and patches/, as the package wilds downloads them",
)
WILDS_CAMELYON = WILDS_CAMELYON_IMAGES.entry("Tumors in tissue from five hospitals (WILDS)", checkpoint_every=100)
