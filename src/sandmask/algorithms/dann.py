"""Domain-adversarial networks, DANN and CDANN, learn features that do not reveal their environment."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.func import vjp

from sandmask.algorithms._adversarial import Adversarial, Discriminator
from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, Problem
from sandmask.algorithms._functions import Hparams, State, cross_entropy, environment_risks, one_hot, trained
from sandmask.functional import EnvBatch, FlatModule, Params
from sandmask.hparams import BELOW_ONE, COUNT, DEPTH, NON_NEGATIVE, Choice, Hparam, IntLogUniform, Like, LogUniform

HPARAMS = (
    Hparam("lambda", 1.0, LogUniform(10, -2, 2), NON_NEGATIVE),
    Hparam("weight_decay_d", 0.0, LogUniform(10, -6, -2), NON_NEGATIVE),
    Hparam("d_steps_per_g_step", 1, IntLogUniform(2, 0, 3), COUNT),
    Hparam("grad_penalty", 0.0, LogUniform(10, -2, 1), NON_NEGATIVE),
    Hparam("beta1", 0.5, Choice(0.0, 0.5), BELOW_ONE),
    # Of the discriminator. On Spirals, the network is also an MLP and has the same width and depth.
    Hparam("mlp_width", 256, IntLogUniform(2, 6, 10), COUNT),
    Hparam("mlp_depth", 3, Choice(3, 4, 5), DEPTH),
    Hparam("mlp_dropout", 0.0, Choice(0.0, 0.1, 0.5), BELOW_ONE),
    Like("lr_g", "lr"),
    Like("lr_d", "lr"),
    Like("weight_decay_g", "weight_decay"),
)


class DANN(Adversarial):
    """A discriminator d minimizes D, and the featurizer f and the classifier c minimize R - lambda D.

    D = sum_i v_i CE(d(z_i), e_i) + grad_penalty mean_i |grad_z CE(d(z_i), e_i)|^2 and R = mean_e R_e, where z = f(x),
    e_i is the environment of example i, and the weight v_i is the same for every example. See `Adversarial` for the
    alternation and the optimizers, which use `lr_g`, `lr_d`, `weight_decay_g` and `weight_decay_d` instead of `lr` and
    `weight_decay`.
    """

    conditional = False  # whether z is f(x) plus an embedding of the class

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        width, depth = problem.sizes.get("mlp_width", 256), problem.sizes.get("mlp_depth", 3)
        n_classes = problem.n_classes if self.conditional else 0
        n_features, n_envs = self.network.n_features, problem.n_envs
        self.discriminator = FlatModule(partial(Discriminator, n_features, n_envs, n_classes, width, depth))

    def extra_state(self, seed: int) -> State:
        """Return the discriminator and its optimizer."""
        return trained("discriminator", self.discriminator, seed)

    def rates(self, who: str, hparams: Hparams) -> Hparams:
        """See `Adversarial.rates`."""
        return {**hparams, "lr": hparams[f"lr_{who}"], "weight_decay": hparams[f"weight_decay_{who}"]}

    def example_weights(self, batch: EnvBatch) -> Tensor:
        """Return the weight v [E, B] of each example in the discriminator's loss."""
        return batch.weight / batch.weight.sum()

    def losses(
        self, vectors: Sequence[Tensor], batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return R - lambda D, D and R."""
        params = self.network.unflatten(vectors[0])
        features = self.network.features(params, batch.inputs, self.dropout(batch, hparams))
        risk = environment_risks(batch.split(self.network.classify(params, features)), batch).mean()
        confusion = self._confusion(self.discriminator.unflatten(vectors[1]), features, batch, hparams)
        return risk - hparams["lambda"] * confusion, confusion, risk

    def _confusion(self, params: Params, z: Tensor, batch: EnvBatch, hparams: Hparams) -> Tensor:
        """Return D."""
        if self.conditional:
            classes = one_hot(batch.y, self.problem.n_classes).flatten(0, 1)
            z = z + self.discriminator(params, "embedding", classes)
        drop = self.discriminator_dropout(batch, hparams)
        logits, pull_back = vjp(lambda z: self.discriminator(params, "logits", z, drop), z)  # type: ignore[misc]
        envs = batch.environments
        loss = (self.example_weights(batch) * cross_entropy(batch.split(logits), envs)).sum()
        # The gradient of the cross-entropy with respect to the logits is softmax minus one-hot. `pull_back` maps it to
        # the gradient with respect to z.
        (slope,) = pull_back(logits.softmax(-1) - one_hot(envs, batch.n_envs).flatten(0, 1))
        penalty = batch.mean(batch.split(slope.square().sum(-1))).mean()
        return loss + hparams["grad_penalty"] * penalty


class CDANN(DANN):
    """DANN with a discriminator of z = f(x) + u_y, where u_y is a learned embedding of the class y.

    All classes have the same weight: v_i = 1 / (n_{y_i} C), where n_y is the number of examples of class y in the
    minibatch, and C is the number of classes.
    """

    conditional = True

    def example_weights(self, batch: EnvBatch) -> Tensor:
        """Return 1 / (number of examples of the same class x number of classes)."""
        same = one_hot(batch.y, self.problem.n_classes)
        counts = (same * batch.weight.unsqueeze(-1)).sum((0, 1))
        of_own_class = (same * counts).sum(-1).clamp_min(1.0)  # below 1 only for padding, whose weight is 0
        return batch.weight / (of_own_class * self.problem.n_classes)


ALGORITHMS.register(
    AlgorithmEntry(
        name="DANN",
        summary="Learn features from which a discriminator cannot tell the environment",
        paper="Ganin et al., Domain-adversarial training of neural networks, JMLR 2016",
        build=DANN,
        hparams=HPARAMS,
    )
)
ALGORITHMS.register(
    AlgorithmEntry(
        name="CDANN",
        summary="Learn features from which, within a class, a discriminator cannot tell the environment",
        paper="Li et al., Deep domain generalization via conditional invariant adversarial networks, ECCV 2018",
        build=CDANN,
        hparams=HPARAMS,
    )
)
