"""The AND-mask."""

from torch import Tensor

from sandmask.masks._base import Mask
from sandmask.masks._functional import TensorMoments, and_weights


class ANDMask(Mask):
    """Keep an element of the mean gradient where enough environments agree on its sign: m = 1[A >= tau].

    A = |mean_e sign(g_e)|, with sign(0) = 0, so that an element that is zero in an environment (a dead
    ReLU) counts against agreement. tau = 0 keeps everything and gives ERM's gradient; tau = 1 requires all
    environments to agree.

    With 3 environments A is 0, 1/3, 2/3 or 1, and only 1/3 or 1 where no gradient is zero: every tau in
    (1/3, 1) is then the same mask.

    Parascandolo et al., "Learning explanations that are hard to vary", ICLR 2021; section 3.1 of the
    SAND-mask paper.

    :param tau: in [0, 1].
    :param rescale: see `Mask`.

    >>> import torch
    >>> ANDMask(tau=1.0)(torch.tensor([[1.0, 3.0], [3.0, -1.0]]))
    tensor([2., 0.])
    """

    def element_weights(self, moments: TensorMoments) -> Tensor:
        """1[A >= tau]."""
        return and_weights(moments.sign_sum, moments.count, self.tau)
