"""WILDSFMoW: land use in satellite images (Christie et al., CVPR 2018), as in WILDS (Koh et al., ICML 2021).

The folder is the one that the package `wilds` downloads: `rgb_metadata.csv` lists the images, of which the
"sequestered" ones are not used. Each region of the world is an environment, as in DomainBed: they are numbered in the
order in which they first occur in that file, and countries without a region are "Other".
"""

from pathlib import Path

from sandmask.datasets._image_set import ImageSet
from sandmask.datasets._rows import Listed, Row
from sandmask.datasets._table import Table

N_REGIONS = 6
NO_REGION = "Other"
SEQUESTERED = "seq"


def read_metadata(folder: Path) -> Listed:
    """The images that `rgb_metadata.csv` lists; row n, counted from 0, is the file rgb_img_n.png."""
    countries, images = Table(folder / "country_code_mapping.csv"), Table(folder / "rgb_metadata.csv")
    codes, columns = ("alpha-3", "region"), ("split", "country_code", "category")
    countries.need(codes)
    images.need(columns)
    regions = {code: region for _, (code, region) in countries.rows(codes) if region}
    rows = []
    seen: dict[str, None] = {}  # the regions, in order
    for number, (_, (split, country, category)) in enumerate(images.rows(columns)):
        region = regions.get(country, NO_REGION)
        seen[region] = None
        if split != SEQUESTERED:
            rows.append(Row(f"images/rgb_img_{number}.png", category, region))
    return Listed(rows, domains=tuple(seen))


WILDS_FMOW_IMAGES = ImageSet(
    name="WILDSFMoW",
    folder="fmow_v1.1",
    environments=tuple(f"region_{number}" for number in range(N_REGIONS)),
    domains=(),  # the regions' names, from the files
    n_classes=62,
    sparse=True,  # not every kind of building is everywhere
    table=read_metadata,
    layout="rgb_metadata.csv, country_code_mapping.csv and images/, as the package wilds downloads them",
)
WILDS_FMOW = WILDS_FMOW_IMAGES.entry("Land use in satellite images of six regions (WILDS)", checkpoint_every=100)
