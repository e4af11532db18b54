"""VLCS: photographs from four collections (Fang, Xu and Rockmore, ICCV 2013)."""

from sandmask.datasets._image_set import ImageSet

VLCS_IMAGES = ImageSet(
    name="VLCS",
    folder="VLCS",
    environments=("C", "L", "S", "V"),
    domains=("Caltech101", "LabelMe", "SUN09", "VOC2007"),
    n_classes=5,
    classes=("bird", "car", "chair", "dog", "person"),
)
VLCS = VLCS_IMAGES.entry("Photographs of birds, cars, chairs, dogs and people from four collections")
