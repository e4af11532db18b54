"""The registered datasets, in the order in which they are listed."""

from sandmask.datasets._base import DATASETS
from sandmask.datasets.colored_mnist import COLORED_MNIST
from sandmask.datasets.debug import DEBUG_28, DEBUG_VECTOR
from sandmask.datasets.domain_net import DOMAIN_NET
from sandmask.datasets.office_home import OFFICE_HOME
from sandmask.datasets.pacs import PACS
from sandmask.datasets.rotated_mnist import ROTATED_MNIST
from sandmask.datasets.spawrious import SPAWRIOUS
from sandmask.datasets.spirals import SPIRALS
from sandmask.datasets.sviro import SVIRO
from sandmask.datasets.terra_incognita import TERRA_INCOGNITA
from sandmask.datasets.vlcs import VLCS
from sandmask.datasets.wilds_camelyon import WILDS_CAMELYON
from sandmask.datasets.wilds_fmow import WILDS_FMOW

for _entry in (
    SPIRALS,
    COLORED_MNIST,
    ROTATED_MNIST,
    VLCS,
    PACS,
    OFFICE_HOME,
    TERRA_INCOGNITA,
    DOMAIN_NET,
    SVIRO,
    WILDS_CAMELYON,
    WILDS_FMOW,
    *SPAWRIOUS,
    DEBUG_28,
    DEBUG_VECTOR,
):
    DATASETS.register(_entry)
