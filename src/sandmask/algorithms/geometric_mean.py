"""The geometric mean of the environments' gradients (Parascandolo et al., ICLR 2021), masked like the AND-mask."""

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, Hparams
from sandmask.algorithms._masked import LogMaskedAlgorithm
from sandmask.algorithms.and_mask import PAPER, RESCALE, TAU
from sandmask.masks import GeometricMean, Mask


class GeometricMeanAlgorithm(LogMaskedAlgorithm):
    """sign(mean_e g_e) exp(mean_e log |g_e|) where |mean_e sign(g_e)| >= tau, and 0 elsewhere."""

    def mask(self, hparams: Hparams) -> Mask:
        """The geometric mean with the AND-mask's threshold."""
        return GeometricMean(tau=hparams["tau"])


ALGORITHMS.register(
    AlgorithmEntry(
        name="GeometricMean",
        summary="Update by the geometric mean of the environments' gradients where enough of them agree",
        paper=PAPER,
        build=GeometricMeanAlgorithm,
        hparams=(*TAU, RESCALE),
    )
)
