"""Domain-adversarial neural networks: features that do not reveal their environment."""

from sandmask.algorithms._adversarial import Adversarial
from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry
from sandmask.algorithms._discriminator import HPARAMS


class DANN(Adversarial):
    """max_d min_{f,c} mean_e R_e(c(f(x))) - lambda D, D = mean cross-entropy of the environment given f(x).

    See `Adversarial` for the alternation, the gradient penalty and the optimizers.
    """


ALGORITHMS.register(
    AlgorithmEntry(
        name="DANN",
        summary="Learn features from which a discriminator cannot tell the environment",
        paper="Ganin et al., Domain-adversarial training of neural networks, JMLR 2016",
        build=DANN,
        hparams=HPARAMS,
    )
)
