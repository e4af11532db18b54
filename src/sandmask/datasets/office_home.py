"""OfficeHome: everyday objects in four styles (Venkateswara et al., CVPR 2017)."""

from sandmask.datasets._image_set import ImageSet

OFFICE_HOME_IMAGES = ImageSet(
    name="OfficeHome",
    folder="office_home",
    environments=("A", "C", "P", "R"),
    domains=("Art", "Clipart", "Product", "Real World"),
    n_classes=65,
)
OFFICE_HOME = OFFICE_HOME_IMAGES.entry("65 kinds of everyday objects as art, clip art, product pictures and photos")
