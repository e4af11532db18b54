"""PACS: photographs, art, cartoons and sketches (Li et al., "Deeper, broader and artier", ICCV 2017)."""

from sandmask.datasets._image_set import ImageSet

PACS_IMAGES = ImageSet(
    name="PACS",
    folder="PACS",
    environments=("A", "C", "P", "S"),
    domains=("art_painting", "cartoon", "photo", "sketch"),
    n_classes=7,
    classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
)
PACS = PACS_IMAGES.entry("Seven kinds of objects as art, cartoon, photo and sketch")
