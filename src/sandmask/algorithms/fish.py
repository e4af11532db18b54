"""Fish: gradient matching by a pass through the environments (Shi et al., ICLR 2022)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry
from sandmask.algorithms._functions import Hparams, Metrics, State, adam_update
from sandmask.functional import EnvBatch, random
from sandmask.hparams import FRACTION, Choice, Hparam


class Fish(Algorithm):
    """Train a copy of the parameters on the environments in turn, and move the parameters towards it (algorithm 1).

    The copy w~ starts at w. For each e in random order, w~ <- Adam(w~, grad R_e(w~)). Then w <- w + meta_lr (w~ - w).
    To first order, this also maximizes the inner products of the environments' gradients. The Adam of w~ keeps its
    state from step to step.
    """

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update: a pass through all environments."""
        inner, adam = state["params"], state["adam"]
        losses = []
        shuffled = batch.take(random.permutation(key, batch.n_envs))
        for e in range(batch.n_envs):
            gradient, loss = self.risk_gradient(inner, shuffled.environment(e), hparams)
            inner, adam = adam_update(inner, gradient, adam, hparams)
            losses.append(loss)
        params = state["params"] + hparams["meta_lr"] * (inner - state["params"])
        changes = {"params": params, "adam": adam, "step": state["step"] + 1}
        return {**state, **changes}, {"loss": torch.stack(losses).mean()}


ALGORITHMS.register(
    AlgorithmEntry(
        name="Fish",
        summary="Step towards the end point of a pass through the environments, one by one",
        paper="Shi et al., Gradient matching for domain generalization, ICLR 2022",
        build=Fish,
        hparams=(Hparam("meta_lr", 0.5, Choice(0.05, 0.1, 0.5), FRACTION),),
    )
)
