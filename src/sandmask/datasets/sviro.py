"""SVIRO: seats of ten cars, rendered (Dias Da Cruz et al., "SVIRO", WACV 2020): what is on the seat.

The archive is the one that the authors made for DomainBed: grey images of single seats, in car/class folders.
"""

from sandmask.datasets._image_set import ImageSet

CARS = ("aclass", "escape", "hilux", "i3", "lexus", "tesla", "tiguan", "tucson", "x5", "zoe")

SVIRO_IMAGES = ImageSet(name="SVIRO", folder="sviro", environments=CARS, domains=CARS, n_classes=7)
SVIRO = SVIRO_IMAGES.entry("Occupants of the rear seats of ten rendered cars")
