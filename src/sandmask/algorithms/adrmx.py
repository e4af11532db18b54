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
    """Label features a and domain features b from two featurizers, and c = a - b. Heads h1, h2, hd; discriminator d.

    d minimizes CE(d(c), e), and the rest minimizes

        R(h1(a)) + R(h2(c)) + dclf_lambda CE(hd(b), e) + rmxd_lambda Rmx + cnt_lambda [S(a) + S(c)]
        - disc_lambda CE(d(c), e)

    with e the number of the environment, S a supervised contrastive loss and Rmx = (1/C) sum over classes of
    CE(h1(c_i + b_j), y), for two random examples i and j of the class, if it has two. (DomainBed's code takes i and j
    from the whole minibatch by mistake.) See `Adversarial` for the alternation and the optimizers, which have no weight
    decay. The prediction is h1(a).
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
        """The domain featurizer (with a classifier that is not used), heads, discriminator and optimizers."""
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
        """The loss of featurizers and classifier, that of discriminator d, and the former without the term of d."""
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
        """Logits by the label features' head."""
        features = self.network.features(self.network.unflatten(state["params"]), x)
        return self.heads(self.heads.unflatten(state["heads"]), "label", features)


class NonlinearHeads(nn.Module):
    """Three classifiers F - F/2 - F/4 - out with ReLUs: "label", "difference" (of classes) and "domain".

    A layer is no narrower than the output.
    """

    def __init__(self, n_features: int, n_classes: int, n_envs: int) -> None:
        super().__init__()
        outs = {"label": n_classes, "difference": n_classes, "domain": n_envs}
        self.heads = nn.ModuleDict({name: _head(n_features, out) for name, out in outs.items()})

    def forward(self, which: str, x: Tensor) -> Tensor:
        """Logits by one of them."""
        logits: Tensor = self.heads[which](x)
        return logits


def _head(n_features: int, n_out: int) -> nn.Sequential:
    half, quarter = max(n_features // 2, n_out), max(n_features // 4, n_out)
    layers = nn.Linear(n_features, half), nn.ReLU(), nn.Linear(half, quarter), nn.ReLU(), nn.Linear(quarter, n_out)
    return nn.Sequential(*layers)


def contrast(features: Tensor, batch: EnvBatch) -> Tensor:
    """S: every example's mean over others j of its class of -log(q_ij + 1e-5), summed, over their number plus 1.

    q_ij = e_ij / (sum_(k != i) e_ik + 2e-5), e_ij = exp(cos(z_i, z_j) / 0.07): the published weight of 1/2 on pairs
    within an environment, and of 1/2 on the others, cancels but for the constant.
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
    """For each class two random examples of it, numbered as in `batch.inputs`, and whether it has two: [C] each."""
    classes = torch.arange(n_classes, device=key.device).unsqueeze(-1)
    member = (batch.y.flatten() == classes) & (batch.weight.flatten() > 0)
    noise = random.uniform(random.fold(batch.example_keys.flatten(), key))
    order = torch.where(member, noise, 2.0).argsort(stable=True)
    last = min(1, order.shape[-1] - 1)
    return order[:, 0], order[:, last], member.sum(-1) >= 2


def environment_loss(logits: Tensor, batch: EnvBatch) -> Tensor:
    """The cross-entropy of the environments' numbers, of logits [N, E]."""
    return batch.mean(cross_entropy(batch.split(logits), batch.environments)).mean()


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
