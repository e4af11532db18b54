"""Additive disentanglement of domain features with remix (Demirel et al., 2023)."""

from typing import NamedTuple

import torch
from torch import Tensor

from sandmask.algorithms._adrmx_parts import (
    NonlinearHeads,
    contrast,
    environment_loss,
    masked_mean_loss,
    pairs_of_classes,
)
from sandmask.algorithms._base import (
    ALGORITHMS,
    Algorithm,
    AlgorithmEntry,
    Hparams,
    Metrics,
    Problem,
    State,
    cross_entropy,
    environment_risks,
    trained,
)
from sandmask.algorithms._discriminator import Discriminator, discriminator_dropout, step_where
from sandmask.functional.adam import adam_init
from sandmask.functional.batch import EnvBatch
from sandmask.functional.flat import FlatModule
from sandmask.hparams import BELOW_ONE, COUNT, DEPTH, NON_NEGATIVE, Choice, Constant, Hparam, Scope, seed_hash


class _Vectors(NamedTuple):
    """The parameters of all networks."""

    params: Tensor
    domain: Tensor
    heads: Tensor
    discriminator: Tensor


class ADRMX(Algorithm):
    """Label features a and domain features b from two featurizers, and c = a - b. Heads h1, h2, hd; discriminator d.

    d minimizes CE(d(c), e), and the rest minimizes

        R(h1(a)) + R(h2(c)) + dclf_lambda CE(hd(b), e) + rmxd_lambda Rmx + cnt_lambda [S(a) + S(c)]
        - disc_lambda CE(d(c), e)

    with e the number of the environment, S a supervised contrastive loss and Rmx = (1/C) sum over classes of
    CE(h1(c_i + b_j), y), for two random examples i and j of the class, if it has two. (DomainBed's code takes i and j
    from the whole minibatch by mistake.) Step t = 1, 2, ... is d's where t mod (1 + d_steps_per_g_step) <
    d_steps_per_g_step. Both have an Adam with betas (beta1, 0.9) and no weight decay. The prediction is h1(a).
    """

    averaged = ("params", "heads")

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        sizes = (self.network.n_features, problem.n_classes, problem.n_envs)
        width, depth = problem.sizes.get("mlp_width", 256), problem.sizes.get("mlp_depth", 9)
        self.heads = FlatModule(lambda: NonlinearHeads(*sizes))
        self.discriminator = FlatModule(lambda: Discriminator(sizes[0], sizes[2], 0, width, depth))

    def extra_state(self, seed: int) -> State:
        """The domain featurizer (with a classifier that is not used), heads, discriminator and optimizers."""
        domain = self.network.init(seed_hash(seed, "domain"))
        heads = self.heads.init(seed_hash(seed, "heads"))
        return {
            "domain": domain,
            "heads": heads,
            **trained("discriminator", self.discriminator, seed),
            "adam": adam_init(torch.cat([domain, domain, heads])),
        }

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update, of the discriminator or of the rest; one backward pass serves either."""
        turn = hparams["d_steps_per_g_step"]
        discriminates = (state["step"] + 1) % (1 + turn) < turn
        vectors = [state[name] for name in _Vectors._fields]
        sizes = [len(vector) for vector in vectors]

        def objective(joint: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            loss, confusion = self._losses(_Vectors(*torch.split(joint, sizes)), batch, hparams, key)
            return torch.where(discriminates, confusion, loss), (loss, confusion)

        joint = torch.cat(vectors)
        gradient, _, (loss, confusion) = self.problem.differentiate.gradient(objective, joint)
        parts = [sum(sizes[:3]), sizes[3]]
        (old, old_d), (of_rest, of_d) = torch.split(joint, parts), torch.split(gradient, parts)
        own = {**hparams, "weight_decay": torch.zeros_like(hparams["lr"])}
        rest, adam = step_where(~discriminates, old, of_rest, state["adam"], own)
        discriminator, d_adam = step_where(discriminates, old_d, of_d, state["discriminator_adam"], own)
        params, domain, heads = torch.split(rest, sizes[:3])
        changes: State = {"params": params, "domain": domain, "heads": heads, "discriminator": discriminator}
        changes |= {"adam": adam, "discriminator_adam": d_adam, "step": state["step"] + 1}
        metrics = {"loss": loss + hparams["disc_lambda"] * confusion, "discriminator_loss": confusion}
        return {**state, **changes}, metrics

    def _losses(self, vectors: _Vectors, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of the rest, and the discriminator's."""
        heads, drop = self.heads.unflatten(vectors.heads), self.dropout(batch, hparams)
        a, b = (
            self.network.features(self.network.unflatten(vector), batch.inputs, drop)
            for vector in (vectors.params, vectors.domain)
        )
        c = a - b
        discriminator = self.discriminator.unflatten(vectors.discriminator)
        d_drop = discriminator_dropout(self.problem, batch, hparams)
        confusion = environment_loss(self.discriminator(discriminator, "logits", c, d_drop), batch)
        first, second, counts = pairs_of_classes(batch, self.problem.n_classes, key)
        classes = torch.arange(self.problem.n_classes, device=key.device)
        remixed = cross_entropy(self.heads(heads, "label", c[first] + b[second]), classes)
        loss = (
            environment_risks(batch.split(self.heads(heads, "label", a)), batch).mean()
            + environment_risks(batch.split(self.heads(heads, "difference", c)), batch).mean()
            + hparams["dclf_lambda"] * environment_loss(self.heads(heads, "domain", b), batch)
            + hparams["rmxd_lambda"] * masked_mean_loss(remixed, counts)
            + hparams["cnt_lambda"] * (contrast(a, batch) + contrast(c, batch))
            - hparams["disc_lambda"] * confusion
        )
        return loss, confusion

    def predict(self, state: State, x: Tensor) -> Tensor:
        """Logits by the label features' head."""
        features = self.network.features(self.network.unflatten(state["params"]), x)
        return self.heads(self.heads.unflatten(state["heads"]), "label", features)


def _of_networks(scope: Scope, lr: float, draw: Choice) -> tuple[Hparam, ...]:
    """DomainBed's rows for a kind of datasets. On Spirals the discriminator has the network's width and depth."""
    return (
        Hparam("lr", lr, draw, NON_NEGATIVE, scope=scope),
        Hparam("mlp_width", 256, Constant(256), COUNT, scope=scope),
        Hparam("mlp_depth", 9, Choice(8, 9, 10), DEPTH, scope=scope),
    )


ALGORITHMS.register(
    AlgorithmEntry(
        name="ADRMX",
        summary="Subtract domain features from label features, and remix them between environments",
        paper="Demirel et al., ADRMX: additive disentanglement of domain features with remix loss, "
        "arXiv:2308.06624, 2023",
        build=ADRMX,
        hparams=(
            Hparam("cnt_lambda", 1.0, Constant(1.0), NON_NEGATIVE),
            Hparam("dclf_lambda", 1.0, Constant(1.0), NON_NEGATIVE),
            Hparam("disc_lambda", 0.75, Constant(0.75), NON_NEGATIVE),
            Hparam("rmxd_lambda", 1.0, Constant(1.0), NON_NEGATIVE),
            Hparam("d_steps_per_g_step", 2, Constant(2), COUNT),
            Hparam("beta1", 0.5, Constant(0.5), BELOW_ONE),
            Hparam("mlp_dropout", 0.0, Constant(0.0), BELOW_ONE),
            *_of_networks("small-image", 3e-3, Choice(5e-4, 1e-3, 2e-3, 3e-3)),
            *_of_networks("image", 3e-5, Choice(2e-5, 3e-5, 4e-5, 5e-5)),
        ),
    )
)
