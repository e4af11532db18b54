"""Conditional DANN: features that, within each class, do not reveal their environment."""

from torch import Tensor

from sandmask.algorithms._adversarial import Adversarial
from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, one_hot
from sandmask.algorithms._discriminator import HPARAMS
from sandmask.functional.batch import EnvBatch


class CDANN(Adversarial):
    """DANN whose discriminator sees f(x) + u_y, u_y a learned embedding of the class; classes weigh the same.

    D = sum_i CE(d(f(x_i) + u_{y_i}), e_i) / (n_{y_i} C), n_y the number of the minibatch's examples of class
    y, C the number of classes.
    """

    conditional = True

    def example_weights(self, batch: EnvBatch) -> Tensor:
        """1 / (examples of the same class x number of classes)."""
        same = one_hot(batch.y, self.problem.n_classes)
        counts = (same * batch.weight.unsqueeze(-1)).sum((0, 1))
        of_own_class = (same * counts).sum(-1).clamp_min(1.0)  # below 1 only for padding, whose weight is 0
        return batch.weight / (of_own_class * self.problem.n_classes)


ALGORITHMS.register(
    AlgorithmEntry(
        name="CDANN",
        summary="Learn features from which, within a class, a discriminator cannot tell the environment",
        paper=("Li et al., Deep domain generalization via conditional invariant adversarial networks, ECCV 2018"),
        build=CDANN,
        hparams=HPARAMS,
    )
)
