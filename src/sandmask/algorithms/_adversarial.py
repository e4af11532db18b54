"""The common part of DANN and CDANN: a discriminator of environments, and a featurizer that learns to mislead it."""

import torch
from torch import Tensor
from torch.func import vjp

from sandmask.algorithms._base import (
    Algorithm,
    Hparams,
    Metrics,
    Problem,
    State,
    cross_entropy,
    environment_risks,
    one_hot,
    trained,
)
from sandmask.algorithms._discriminator import Discriminator, discriminator_dropout, step_where
from sandmask.functional.batch import EnvBatch
from sandmask.functional.flat import FlatModule, Params


class Adversarial(Algorithm):
    """A discriminator d minimizes D; featurizer f and classifier c minimize R - lambda D.

    D = sum_i v_i CE(d(z_i), e_i) + grad_penalty mean_i |grad_z CE(d(z_i), e_i)|^2, R = mean_e R_e, z = f(x).
    Step t = 1, 2, ... is the discriminator's where t mod (1 + d_steps_per_g_step) < d_steps_per_g_step, and
    else the generator's. Both have an Adam with betas (beta1, 0.9); `lr_g`, `lr_d`, `weight_decay_g` and
    `weight_decay_d` take the place of `lr` and `weight_decay`.
    """

    conditional = False  # whether z is f(x) plus an embedding of the class

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        width, depth = problem.sizes.get("mlp_width", 256), problem.sizes.get("mlp_depth", 3)
        n_classes = problem.n_classes if self.conditional else 0
        n_features, n_envs = self.network.n_features, problem.n_envs
        self.discriminator = FlatModule(lambda: Discriminator(n_features, n_envs, n_classes, width, depth))

    def extra_state(self, seed: int) -> State:
        """The discriminator and its optimizer."""
        return trained("discriminator", self.discriminator, seed)

    def example_weights(self, batch: EnvBatch) -> Tensor:
        """The weight v [E, B] of each example in the discriminator's loss."""
        return batch.weight / batch.weight.sum()

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update, of the discriminator or of the generator; one backward pass serves either."""
        turn = hparams["d_steps_per_g_step"]
        discriminates = (state["step"] + 1) % (1 + turn) < turn
        sizes = [self.network.numel, self.discriminator.numel]

        def objective(joint: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            vector, d_vector = torch.split(joint, sizes)
            features, risk = self._classify(self.network.unflatten(vector), batch, hparams)
            confusion = self._confusion(self.discriminator.unflatten(d_vector), features, batch, hparams)
            value = torch.where(discriminates, confusion, risk - hparams["lambda"] * confusion)
            return value, (risk, confusion)

        joint = torch.cat([state["params"], state["discriminator"]])
        gradient, _, (risk, confusion) = self.problem.differentiate.gradient(objective, joint)
        g_gradient, d_gradient = torch.split(gradient, sizes)
        params, adam = step_where(~discriminates, state["params"], g_gradient, state["adam"], _of("g", hparams))
        vector, d_adam = state["discriminator"], state["discriminator_adam"]
        vector, d_adam = step_where(discriminates, vector, d_gradient, d_adam, _of("d", hparams))
        changes = {"params": params, "adam": adam, "discriminator": vector, "discriminator_adam": d_adam}
        metrics = {"loss": risk, "discriminator_loss": confusion}
        return {**state, **changes, "step": state["step"] + 1}, metrics

    def _classify(self, params: Params, batch: EnvBatch, hparams: Hparams) -> tuple[Tensor, Tensor]:
        """Features [E * B, n_features], and R."""
        features = self.network.features(params, batch.inputs, self.dropout(batch, hparams))
        logits = batch.split(self.network.classify(params, features))
        return features, environment_risks(logits, batch).mean()

    def _confusion(self, params: Params, z: Tensor, batch: EnvBatch, hparams: Hparams) -> Tensor:
        """D."""
        if self.conditional:
            classes = one_hot(batch.y, self.problem.n_classes).flatten(0, 1)
            z = z + self.discriminator(params, "embedding", classes)
        drop = discriminator_dropout(self.problem, batch, hparams)
        logits, pull_back = vjp(lambda z: self.discriminator(params, "logits", z, drop), z)  # type: ignore[misc]
        envs = batch.environments
        loss = (self.example_weights(batch) * cross_entropy(batch.split(logits), envs)).sum()
        # Cross-entropy's gradient by the logits is softmax minus one-hot; `pull_back` takes it on to z.
        (slope,) = pull_back(logits.softmax(-1) - one_hot(envs, batch.n_envs).flatten(0, 1))
        penalty = batch.mean(batch.split(slope.square().sum(-1))).mean()
        return loss + hparams["grad_penalty"] * penalty


def _of(who: str, hparams: Hparams) -> Hparams:
    """With the learning rate and weight decay of the generator or the discriminator."""
    return {**hparams, **{name: hparams[f"{name}_{who}"] for name in ("lr", "weight_decay")}}
