"""Spectral decoupling (Pezeshki et al., NeurIPS 2021)."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State, environment_risks
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform


class SD(ObjectiveAlgorithm):
    """Minimize mean_e R_e + sd_reg * mean(logits^2). The penalty decouples the learning of different features."""

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus the weighted mean square of the logits."""
        logits = self.logits(params, batch, hparams)
        penalty = batch.mean(logits.square().mean(-1)).mean()
        return environment_risks(logits, batch).mean() + hparams["sd_reg"] * penalty, {}


ALGORITHMS.register(
    AlgorithmEntry(
        name="SD",
        summary="Penalize the square of the logits",
        paper="Pezeshki et al., Gradient starvation: a learning proclivity in neural networks, NeurIPS 2021",
        build=SD,
        compares_environments=False,
        hparams=(Hparam("sd_reg", 0.1, LogUniform(10, -5, -1), NON_NEGATIVE),),
    )
)
