"""The image datasets of DomainBed whose files are in folders domain/class.

- VLCS: photographs from four collections (Fang, Xu and Rockmore, ICCV 2013).
- PACS: photographs, art, cartoons and sketches (Li et al., "Deeper, broader and artier", ICCV 2017).
- OfficeHome: everyday objects in four styles (Venkateswara et al., CVPR 2017).
- TerraIncognita: animals before camera traps at four places (Beery, Van Horn and Perona, ECCV 2018).
- DomainNet: 345 kinds of objects in six styles (Peng et al., "Moment matching", ICCV 2019).
- SVIRO: seats of ten cars, rendered (Dias Da Cruz et al., "SVIRO", WACV 2020), in the authors' archive for DomainBed.
"""

from sandmask.datasets._image_set import ImageSet

VLCS = ImageSet(
    name="VLCS",
    description="Photographs of birds, cars, chairs, dogs and people from four collections",
    folder="VLCS",
    environments=("C", "L", "S", "V"),
    domains=("Caltech101", "LabelMe", "SUN09", "VOC2007"),
    n_classes=5,
    classes=("bird", "car", "chair", "dog", "person"),
)
PACS = ImageSet(
    name="PACS",
    description="Seven kinds of objects as art, cartoon, photo and sketch",
    folder="PACS",
    environments=("A", "C", "P", "S"),
    domains=("art_painting", "cartoon", "photo", "sketch"),
    n_classes=7,
    classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
)
OFFICE_HOME = ImageSet(
    name="OfficeHome",
    description="65 kinds of everyday objects as art, clip art, product pictures and photos",
    folder="office_home",
    environments=("A", "C", "P", "R"),
    domains=("Art", "Clipart", "Product", "Real World"),
    n_classes=65,
)
LOCATIONS = ("100", "38", "43", "46")
TERRA_INCOGNITA = ImageSet(
    name="TerraIncognita",
    description="Ten kinds of animals (or none) before camera traps at four places",
    folder="terra_incognita",
    environments=tuple(f"L{location}" for location in LOCATIONS),
    domains=tuple(f"location_{location}" for location in LOCATIONS),
    n_classes=10,
    classes=("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel"),
    sparse=True,  # not every animal passes every camera
)
DOMAIN_NET = ImageSet(
    name="DomainNet",
    description="345 kinds of objects in six styles",
    folder="domain_net",
    environments=("clip", "info", "paint", "quick", "real", "sketch"),
    domains=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    n_classes=345,
    checkpoint_every=1000,
)
CARS = ("aclass", "escape", "hilux", "i3", "lexus", "tesla", "tiguan", "tucson", "x5", "zoe")
SVIRO = ImageSet("SVIRO", "sviro", CARS, CARS, "Occupants of the rear seats of ten rendered cars", n_classes=7)
