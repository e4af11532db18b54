"""The rows that depend on the dataset and not on the algorithm: the upper part of the paper's table."""

from sandmask.hparams._bounds import BELOW_ONE, COUNT, NON_NEGATIVE
from sandmask.hparams._distributions import Choice, Constant, IntLogUniform, LogUniform
from sandmask.hparams._hparam import Hparam

# Where several rows of one name hold, the last one counts.
SHARED: tuple[Hparam, ...] = (
    Hparam("lr", 1e-3, LogUniform(10, -4.5, -3.5), NON_NEGATIVE, scope="mnist"),
    Hparam("lr", 1e-3, LogUniform(10, -4.5, -2.5), NON_NEGATIVE, scope="mnist", space="domainbed"),
    Hparam("lr", 5e-5, LogUniform(10, -5, -3.5), NON_NEGATIVE, scope="image"),
    Hparam("lr", 1e-2, LogUniform(10, -3.5, -1.5), NON_NEGATIVE, scope="spirals"),
    Hparam("batch_size", 64, IntLogUniform(2, 3, 9), COUNT, scope="mnist"),
    Hparam("batch_size", 32, IntLogUniform(2, 3, 5.5), COUNT, scope="image"),
    Hparam("batch_size", 32, IntLogUniform(2, 3, 5), COUNT, dataset="DomainNet"),
    Hparam("batch_size", 512, IntLogUniform(2, 3, 9), COUNT, scope="spirals"),
    Hparam("weight_decay", 0.0, Constant(0.0), NON_NEGATIVE, scope="mnist"),
    Hparam("weight_decay", 0.0, LogUniform(10, -6, -2), NON_NEGATIVE, scope="image"),
    Hparam("weight_decay", 1e-3, LogUniform(10, -6, -2), NON_NEGATIVE, scope="spirals"),
    Hparam("mlp_width", 256, IntLogUniform(2, 6, 10), COUNT, scope="spirals"),
    Hparam("mlp_depth", 3, Choice(3, 4, 5), COUNT, scope="spirals"),
    # DomainBed names dropout after the network. The MNIST ConvNet has none; its value is drawn all the same.
    Hparam("dropout", 0.0, Choice(0.0, 0.1, 0.5), BELOW_ONE, stream="resnet_dropout"),
    Hparam("dropout", 0.0, Choice(0.0, 0.1, 0.5), BELOW_ONE, scope="spirals", stream="mlp_dropout"),
)
