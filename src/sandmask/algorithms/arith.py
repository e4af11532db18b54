"""Arithmetic meta-learning (Wang et al., CVPR 2025)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry
from sandmask.algorithms._functions import Hparams, Metrics, State, descend
from sandmask.functional import EnvBatch, random
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform


class Arith(Algorithm):
    """Pass through the environments with SGD, and update by a weighted mean of the gradients: mean_k c_k g_k.

    In a random order e_1, ..., e_E of the environments, g_k = grad R_(e_k)(w_(k-1)) and w_k = w_(k-1) - a g_k, where a
    is `arith_lr`. The weights decrease linearly, c_k = 2 (E + 1 - k) / (E + 1): 1.5, 1 and 0.5 for three environments.
    The optimizer is Adam. (The released code also divides the update by a. With Adam, this only changes the share of
    the weight decay.) The range of a is ours.
    """

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update: a pass through all environments."""
        inner, n_envs = state["params"], batch.n_envs
        gradients, losses = [], []
        shuffled = batch.take(random.permutation(key, n_envs))
        for e in range(n_envs):
            gradient, loss = self.risk_gradient(inner, shuffled.environment(e), hparams)
            inner = inner - hparams["arith_lr"] * gradient
            gradients.append(gradient * (2.0 * (n_envs - e) / (n_envs + 1)))
            losses.append(loss)
        gradient = torch.stack(gradients).mean(0)
        return {**state, **descend(state, gradient, state["adam"], hparams)}, {"loss": torch.stack(losses).mean()}


ALGORITHMS.register(
    AlgorithmEntry(
        name="Arith",
        summary="Pass through the environments, one by one, and weight earlier gradients more",
        paper="Wang et al., Balanced direction from multifarious choices: arithmetic meta-learning for domain "
        "generalization, CVPR 2025",
        build=Arith,
        hparams=(Hparam("arith_lr", 1e-2, LogUniform(10, -3, -1), NON_NEGATIVE),),
    )
)
