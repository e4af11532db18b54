"""Two datasets of WILDS (Koh et al., ICML 2021), in the folders that the package `wilds` downloads.

- WILDSCamelyon: tumors in lymph nodes from five hospitals (Bandi et al., 2018). As in DomainBed, each hospital
  (`center`) is an environment. Its patches are in the order of `metadata.csv`.
- WILDSFMoW: land use in satellite images (Christie et al., CVPR 2018). As in DomainBed, each region of the world is an
  environment, in the order in which the regions first occur in `rgb_metadata.csv`. Countries without a region are
  "Other". "Sequestered" images are not used.
"""

from pathlib import Path

from sandmask.datasets._tree import Listed, Row
from sandmask.datasets.image_sets import ImageSet
from sandmask.datasets.manifest import Table

COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center")
CLASSES = ("normal", "tumor")
HOSPITALS = tuple(f"hospital_{number}" for number in range(5))
COUNTS = (59_436, 34_904, 85_054, 129_838, 146_722)


def read_camelyon(folder: Path) -> Listed:
    """Return the patches that `metadata.csv` lists."""
    table = Table(folder / "metadata.csv")
    table.need(COLUMNS)
    rows = []
    for number, (patient, node, x, y, tumor, center) in table.rows(COLUMNS):
        if tumor not in ("0", "1"):
            raise table.error(number, f"tumor should be 0 or 1. Found {tumor!r}")
        slide = f"patient_{patient.zfill(3)}_node_{node}"
        path = f"patches/{slide}/patch_{slide}_x_{x}_y_{y}.png"
        rows.append(Row(path, CLASSES[int(tumor)], f"hospital_{center}"))
    return Listed(rows)


WILDS_CAMELYON = ImageSet(
    name="WILDSCamelyon",
    folder="camelyon17_v1.0",
    environments=HOSPITALS,
    domains=HOSPITALS,
    description="Tumors in tissue from five hospitals (WILDS)",
    checkpoint_every=100,
    n_classes=len(CLASSES),
    classes=CLASSES,
    table=read_camelyon,
    layout="metadata.csv and patches/, as the package wilds downloads them",
)


def read_fmow(folder: Path) -> Listed:
    """Return the images that `rgb_metadata.csv` lists. Row n, counted from 0, is the file rgb_img_n.png."""
    countries, images = Table(folder / "country_code_mapping.csv"), Table(folder / "rgb_metadata.csv")
    codes, columns = ("alpha-3", "region"), ("split", "country_code", "category")
    countries.need(codes)
    images.need(columns)
    regions = {code: region for _, (code, region) in countries.rows(codes) if region}
    rows = []
    seen: dict[str, None] = {}  # the regions, in order
    for number, (_, (split, country, category)) in enumerate(images.rows(columns)):
        region = regions.get(country, "Other")
        seen[region] = None
        if split != "seq":
            rows.append(Row(f"images/rgb_img_{number}.png", category, region))
    return Listed(rows, domains=tuple(seen))


WILDS_FMOW = ImageSet(
    name="WILDSFMoW",
    folder="fmow_v1.1",
    environments=tuple(f"region_{number}" for number in range(6)),
    domains=(),  # the regions' names, from the files
    description="Land use in satellite images of six regions (WILDS)",
    checkpoint_every=100,
    n_classes=62,
    sparse=True,  # some regions lack a class
    table=read_fmow,
    layout="rgb_metadata.csv, country_code_mapping.csv and images/, as the package wilds downloads them",
)
