"""Transfer: features for which nearby classifiers have similar risks everywhere (Zhang et al., NeurIPS 2021)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry, Problem
from sandmask.algorithms._functions import Hparams, Metrics, Parts, State, adam_update, environment_risks
from sandmask.functional import AdamState, EnvBatch, adam_init
from sandmask.hparams import NON_NEGATIVE, Bounds, Choice, Constant, Hparam, LogUniform, Uniform

MOST_STEPS = 10


class Transfer(Algorithm):
    """Train a featurizer f and a classifier c against an adversary a, a classifier near c with a large gap of risks.

    The gap is gap(a, f) = max_e R_e(a, f) - min_e R_e(a, f). One update (algorithm 1) has these steps:

    1. f and c minimize mean_e R_e(c, f), and then f minimizes t_lambda gap(a, f).
    2. a = c. Then, `d_steps_per_g` times, a <- a + lr_d t_lambda grad_a gap(a, f), projected onto the ball |a - c| <=
       delta.

    f and c each have an Adam, or use plain SGD if `gda` is 1. (In DomainBed's code, the featurizer and the classifier
    are not trained with `gda`, which all of its draws set. Its draws of `weight_decay_d` and `beta1` have no effect and
    are left out here.)
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.parts = Parts(self.network)

    def extra_state(self, seed: int) -> State:
        """Return the adversary, which is equal to the classifier at first, and an optimizer for each part."""
        featurizer, head = self.parts.split(self.network.init(seed))
        return {"adversary": head.clone(), "adam": adam_init(featurizer), "head_adam": adam_init(head)}

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update of each part."""
        gradient, loss = self.risk_gradient(state["params"], batch, hparams)
        featurizer, head = self.parts.split(state["params"])
        of_featurizer, of_head = self.parts.split(gradient)
        featurizer, adam = _optimized(featurizer, of_featurizer, state["adam"], hparams)
        head, head_adam = _optimized(head, of_head, state["head_adam"], hparams)
        of_gap, gap = self._gap_gradient(featurizer, head, state["adversary"], batch, hparams)
        featurizer, adam = _optimized(featurizer, of_gap, adam, hparams)
        params = torch.cat([featurizer, head])
        adversary = self._ascended(params, head, batch, hparams)
        changes = {"params": params, "adam": adam, "head_adam": head_adam, "adversary": adversary}
        return {**state, **changes, "step": state["step"] + 1}, {"loss": loss, "gap": gap}

    def _gap_gradient(
        self, featurizer: Tensor, head: Tensor, adversary: Tensor, batch: EnvBatch, hparams: Hparams
    ) -> tuple[Tensor, Tensor]:
        def gap(vector: Tensor) -> tuple[Tensor, tuple[()]]:
            params = self.network.unflatten(torch.cat([vector, head]))
            return self._gap(adversary, self.features(params, batch, hparams), batch, hparams), ()

        gradient, value, _ = self.problem.differentiate.gradient(gap, featurizer)
        return gradient, value

    def _ascended(self, params: Tensor, head: Tensor, batch: EnvBatch, hparams: Hparams) -> Tensor:
        """Return the next adversary. The number of steps is fixed; steps after `d_steps_per_g` have no effect."""
        features = self.features(self.network.unflatten(params), batch, hparams).detach()

        def gap(vector: Tensor) -> tuple[Tensor, tuple[()]]:
            return self._gap(vector, features, batch, hparams), ()

        adversary = head
        for turn in range(MOST_STEPS):
            gradient, _, _ = self.problem.differentiate.gradient(gap, adversary)
            moved = adversary + hparams["lr_d"] * gradient - head
            distance = torch.linalg.vector_norm(moved)
            near = moved * (hparams["delta"] / distance.clamp_min(1e-12)).clamp_max(1.0)
            adversary = torch.where(turn < hparams["d_steps_per_g"], head + near, adversary)
        return adversary

    def _gap(self, adversary: Tensor, features: Tensor, batch: EnvBatch, hparams: Hparams) -> Tensor:
        risks = environment_risks(self.parts.classify(adversary, features), batch)
        return hparams["t_lambda"] * (risks.amax() - risks.amin())


def _optimized(vector: Tensor, gradient: Tensor, adam: AdamState, hparams: Hparams) -> tuple[Tensor, AdamState]:
    """Take one step of Adam, or of plain SGD if `gda` is 1."""
    plain = vector - hparams["lr"] * (gradient + hparams["weight_decay"] * vector)
    vector, adam = adam_update(vector, gradient, adam, hparams)
    return torch.where(hparams["gda"] > 0, plain, vector), adam


ALGORITHMS.register(
    AlgorithmEntry(
        name="Transfer",
        summary="Learn features on which all classifiers near the trained one have similar risks in all environments",
        paper="Zhang et al., Quantifying and improving transferability in domain generalization, NeurIPS 2021",
        build=Transfer,
        hparams=(
            Hparam("t_lambda", 1.0, LogUniform(10, -2, 1), NON_NEGATIVE),
            Hparam("delta", 2.0, Uniform(0.1, 3), NON_NEGATIVE),
            Hparam("d_steps_per_g", 10, Choice(1, 2, 5), Bounds(0, MOST_STEPS)),
            Hparam("lr_d", 1e-3, LogUniform(10, -4.5, -2.5), NON_NEGATIVE),
            Hparam("gda", 0, Constant(1), Bounds(0, 1)),
        ),
    )
)
