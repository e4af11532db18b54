"""Additive disentanglement of domain features with remix (Demirel et al., 2023)."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms._adversarial import Adversarial, Discriminator
from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, Problem
from sandmask.algorithms._functions import Hparams, State, cross_entropy, environment_risks, pairs_of, trained
from sandmask.functional import EnvBatch, FlatModule, adam_init, random
from sandmask.hparams import BELOW_ONE, COUNT, DEPTH, NON_NEGATIVE, Choice, Constant, Hparam, Scope, seed_hash

TEMPERATURE, EPSILON = 0.07, 1e-5


class ADRMX(Adversarial):
    """Adversarial training with label features a and domain features b from two featurizers, and c = a - b.

    h1, h2 and hd are classifiers, and d is a discriminator. d minimizes CE(d(c), e), and the rest minimizes

        R(h1(a)) + R(h2(c)) + dclf_lambda CE(hd(b), e) + rmxd_lambda Rmx + cnt_lambda [S(a) + S(c)]
        - disc_lambda CE(d(c), e)

    where e is the index of the environment and S a supervised contrastive loss. Rmx = (1/C) sum over the C classes of
    CE(h1(c_i + b_j), y), for two random examples i and j of the class, if it has two. (DomainBed's code takes i and j
    from the whole minibatch by mistake.) See `Adversarial` for the alternation and the optimizers, which have no weight
    decay here. Predictions are h1(a).
    """

    generator = ("params", "domain", "heads")
    averaged = ("params", "heads")

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        sizes = (self.network.n_features, problem.n_classes, problem.n_envs)
        width, depth = problem.sizes.get("mlp_width", 256), problem.sizes.get("mlp_depth", 9)
        self.heads = FlatModule(partial(NonlinearHeads, *sizes))
        self.discriminator = FlatModule(partial(Discriminator, sizes[0], sizes[2], 0, width, depth))

    def extra_state(self, seed: int) -> State:
        """Return the domain featurizer (with an unused classifier), the heads, the discriminator and the optimizers."""
        domain = self.network.init(seed_hash(seed, "domain"))
        heads = self.heads.init(seed_hash(seed, "heads"))
        return {
            "domain": domain,
            "heads": heads,
            **trained("discriminator", self.discriminator, seed),
            "adam": adam_init(torch.cat([domain, domain, heads])),
        }

    def rates(self, who: str, hparams: Hparams) -> Hparams:
        """See `Adversarial.rates`."""
        return {**hparams, "weight_decay": torch.zeros_like(hparams["lr"])}

    def losses(
        self, vectors: Sequence[Tensor], batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of the rest, the loss of d, and the former without the term of d."""
        *featurizers, of_heads, of_discriminator = vectors
        heads, drop = self.heads.unflatten(of_heads), self.dropout(batch, hparams)
        a, b = (self.network.features(self.network.unflatten(vector), batch.inputs, drop) for vector in featurizers)
        c = a - b
        discriminator = self.discriminator.unflatten(of_discriminator)
        d_drop = self.discriminator_dropout(batch, hparams)
        confusion = environment_loss(self.discriminator(discriminator, "logits", c, d_drop), batch)
        first, second, counts = pairs_of_classes(batch, self.problem.n_classes, key)
        classes = torch.arange(self.problem.n_classes, device=key.device)
        remixed = cross_entropy(self.heads(heads, "label", c[first] + b[second]), classes)
        loss = (
            environment_risks(batch.split(self.heads(heads, "label", a)), batch).mean()
            + environment_risks(batch.split(self.heads(heads, "difference", c)), batch).mean()
            + hparams["dclf_lambda"] * environment_loss(self.heads(heads, "domain", b), batch)
            + hparams["rmxd_lambda"] * torch.where(counts, remixed, 0.0).mean()
            + hparams["cnt_lambda"] * (contrast(a, batch) + contrast(c, batch))
            - hparams["disc_lambda"] * confusion
        )
        return loss, confusion, loss + hparams["disc_lambda"] * confusion

    def predict(self, state: State, x: Tensor) -> Tensor:
        """Return the logits h1(a)."""
        features = self.network.features(self.network.unflatten(state["params"]), x)
        return self.heads(self.heads.unflatten(state["heads"]), "label", features)


class NonlinearHeads(nn.Module):
    """The classifiers "label" (h1), "difference" (h2) and "domain" (hd).

    Each has layers of widths F/2, F/4 and the number of outputs, with ReLUs between them. No layer is narrower than the
    output.
    """

    def __init__(self, n_features: int, n_classes: int, n_envs: int) -> None:
        super().__init__()
        outs = {"label": n_classes, "difference": n_classes, "domain": n_envs}
        self.heads = nn.ModuleDict({name: _head(n_features, out) for name, out in outs.items()})

    def forward(self, which: str, x: Tensor) -> Tensor:
        """Return the logits of one of the classifiers."""
        logits: Tensor = self.heads[which](x)
        return logits


def _head(n_features: int, n_out: int) -> nn.Sequential:
    half, quarter = max(n_features // 2, n_out), max(n_features // 4, n_out)
    layers = nn.Linear(n_features, half), nn.ReLU(), nn.Linear(half, quarter), nn.ReLU(), nn.Linear(quarter, n_out)
    return nn.Sequential(*layers)


def contrast(features: Tensor, batch: EnvBatch) -> Tensor:
    """Return S = sum_i l_i / (n + 1), where l_i is the mean of -log(q_ij + 1e-5) over other examples j of the class.

    The sum is over the n examples i whose class has other examples. q_ij = e_ij / (sum_(k != i) e_ik + 2e-5), where
    e_ij = exp(cos(z_i, z_j) / 0.07). The published weights of 1/2 for pairs within an environment and 1/2 for other
    pairs cancel, except in the constant.
    """
    pairs = pairs_of(batch)
    positive = pairs.other & pairs.same_class
    unit = F.normalize(features, dim=-1)
    exponentials = torch.where(pairs.other, torch.exp(unit @ unit.T / TEMPERATURE), 0.0)
    share = exponentials / (exponentials.sum(-1, keepdim=True) + 2.0 * EPSILON)
    counts = positive.sum(-1)
    means = torch.where(positive, -torch.log(share + EPSILON), 0.0).sum(-1) / counts.clamp_min(1)
    return means.sum() / ((counts > 0).sum() + 1)


def pairs_of_classes(batch: EnvBatch, n_classes: int, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return two random examples of each class, by index in `batch.inputs`, and whether it has two: [C] each."""
    classes = torch.arange(n_classes, device=key.device).unsqueeze(-1)
    member = (batch.y.flatten() == classes) & (batch.weight.flatten() > 0)
    noise = random.uniform(random.fold(batch.example_keys.flatten(), key))
    order = torch.where(member, noise, 2.0).argsort(stable=True)
    last = min(1, order.shape[-1] - 1)
    return order[:, 0], order[:, last], member.sum(-1) >= 2


def environment_loss(logits: Tensor, batch: EnvBatch) -> Tensor:
    """Return the cross-entropy of logits [N, E] with the indices of the environments as labels."""
    return batch.mean(cross_entropy(batch.split(logits), batch.environments)).mean()


def _of_networks(scope: Scope, lr: float, draw: Choice) -> tuple[Hparam, ...]:
    """Return DomainBed's rows for a scope. On Spirals, the discriminator has the width and depth of the network."""
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
