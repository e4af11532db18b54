"""Style-agnostic networks (Nam et al., CVPR 2021): classify by content, and unlearn style."""

from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry, Problem
from sandmask.algorithms._functions import Hparams, Metrics, Parts, State, adam_update, environment_risks
from sandmask.functional import EnvBatch, FlatModule, adam_init, random
from sandmask.functional.differentiate import Pull
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform, seed_hash

_EPSILON = 1e-5


class SagNet(Algorithm):
    """Train a featurizer f, a content head c and a style head s in three Adam steps per update.

    1. f and c minimize R(c(SR(f(x)))), where R = mean_e R_e.
    2. s minimizes R(s(CR(f(x)))).
    3. f minimizes sag_w_adv CE(uniform, s(CR(f(x)))).

    The style of a feature vector is its mean and variance, and its content is the normalized vector (as in DomainBed's
    code; the paper computes both from feature maps). SR mixes the style of an example with that of another example at a
    random ratio. CR replaces the content by that of another example, which counts as a constant. Each of f, c and s has
    its own Adam.
    """

    linear_only = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.style = FlatModule(partial(nn.Linear, self.network.n_features, problem.n_classes))
        self.parts = Parts(self.network)

    def extra_state(self, seed: int) -> State:
        """Return the style head, and an optimizer for each part."""
        featurizer, content = self.parts.split(self.network.init(seed))
        style = self.style.init(seed_hash(seed, "style"))
        optimizers = {"adam": featurizer, "content_adam": content, "style_adam": style}
        return {"style": style, **{name: adam_init(part) for name, part in optimizers.items()}}

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update, which consists of three Adam steps."""
        turns = Exchange.turns(batch, key, 3)
        state, content_loss = self._learn_content(state, batch, hparams, turns[0])
        features, pull = self.problem.differentiate.pullback(
            lambda vector: self._features(vector, batch, hparams), state["params"]
        )
        state, style_loss = self._learn_style(state, features, batch, hparams, turns[1])
        state, adversarial_loss = self._unlearn_style(state, features, pull, batch, hparams, turns[2])
        metrics = {"loss": content_loss, "style_loss": style_loss, "adversarial_loss": adversarial_loss}
        return {**state, "step": state["step"] + 1}, metrics

    def _learn_content(
        self, state: State, batch: EnvBatch, hparams: Hparams, exchange: "Exchange"
    ) -> tuple[State, Tensor]:
        def risk(vector: Tensor) -> tuple[Tensor, tuple[()]]:
            mixed = exchange.mix_styles(self._features(vector, batch, hparams))
            logits = self.network.classify(self.network.unflatten(vector), mixed)
            return environment_risks(batch.split(logits), batch).mean(), ()

        gradient, loss, _ = self.problem.differentiate.gradient(risk, state["params"])
        featurizer, content = self.parts.split(state["params"])
        of_featurizer, of_content = self.parts.split(gradient)
        featurizer, adam = adam_update(featurizer, of_featurizer, state["adam"], hparams)
        content, content_adam = adam_update(content, of_content, state["content_adam"], hparams)
        params = torch.cat([featurizer, content])
        return {**state, "params": params, "adam": adam, "content_adam": content_adam}, loss

    def _learn_style(
        self, state: State, features: Tensor, batch: EnvBatch, hparams: Hparams, exchange: "Exchange"
    ) -> tuple[State, Tensor]:
        swapped = exchange.swap_contents(features)

        def risk(vector: Tensor) -> tuple[Tensor, tuple[()]]:
            logits = self.style(self.style.unflatten(vector), swapped)
            return environment_risks(batch.split(logits), batch).mean(), ()

        gradient, loss, _ = self.problem.differentiate.gradient(risk, state["style"])
        style, adam = adam_update(state["style"], gradient, state["style_adam"], hparams)
        return {**state, "style": style, "style_adam": adam}, loss

    def _unlearn_style(
        self, state: State, features: Tensor, pull: Pull, batch: EnvBatch, hparams: Hparams, exchange: "Exchange"
    ) -> tuple[State, Tensor]:
        """Take step 3. `pull` maps gradients of the features, which step 2 leaves unchanged, to the parameters."""

        def distance_to_uniform(features: Tensor) -> tuple[Tensor, tuple[()]]:
            swapped = exchange.swap_contents(features)
            logits = batch.split(self.style(self.style.unflatten(state["style"]), swapped))
            return hparams["sag_w_adv"] * batch.mean(-F.log_softmax(logits, dim=-1).mean(-1)).mean(), ()

        of_features, loss, _ = self.problem.differentiate.gradient(distance_to_uniform, features)
        featurizer, content = self.parts.split(state["params"])
        featurizer, adam = adam_update(featurizer, self.parts.split(pull(of_features))[0], state["adam"], hparams)
        return {**state, "params": torch.cat([featurizer, content]), "adam": adam}, loss

    def _features(self, vector: Tensor, batch: EnvBatch, hparams: Hparams) -> Tensor:
        params = self.network.unflatten(vector)
        return self.network.features(params, batch.inputs, self.dropout(batch, hparams))


class Exchange:
    """A random partner and a random ratio for every example of a batch, drawn with the keys of the examples."""

    def __init__(self, batch: EnvBatch, key: Tensor, partner: Tensor | None = None) -> None:
        self._batch, self._key = batch, key
        self.partner = random_partners(batch, key) if partner is None else partner

    @classmethod
    def turns(cls, batch: EnvBatch, key: Tensor, n_turns: int) -> list["Exchange"]:
        """Return the exchanges with the keys fold(key, 0), fold(key, 1), ... It is faster to draw them together."""
        keys = random.fold(key, torch.arange(n_turns, device=key.device))
        partners = random_partners(batch, keys.unsqueeze(-1))
        return [cls(batch, *own) for own in zip(keys.unbind(), partners.unbind(), strict=True)]

    @cached_property
    def ratio(self) -> Tensor:
        """The share of an example's own style in a mixture, [N, 1]."""
        rows = random.fold(self._batch.example_keys.flatten(), self._key)
        return random.uniform(random.fold(rows, 0)).unsqueeze(-1)

    def mix_styles(self, features: Tensor) -> Tensor:
        """Return features [N, F] whose styles are mixed with those of their partners."""
        content, mean, variance = take_apart(features)
        styles = torch.cat([mean, variance], dim=-1)
        styles = self.ratio * styles + (1.0 - self.ratio) * self._of_partner(styles)
        mean, variance = torch.split(styles, 1, dim=-1)
        return content * (variance + _EPSILON).sqrt() + mean

    def swap_contents(self, features: Tensor) -> Tensor:
        """Return features [N, F] with their own styles and the contents of their partners, which count as constants."""
        content, mean, variance = take_apart(features)
        return self._of_partner(content.detach()) * (variance + _EPSILON).sqrt() + mean

    def _of_partner(self, rows: Tensor) -> Tensor:
        """Return the row of each example's partner, for rows [N, ...]."""
        return rows.gather(0, self.partner.unsqueeze(-1).expand_as(rows))


def random_partners(batch: EnvBatch, key: Tensor) -> Tensor:
    """Return the index of the partner of every example: [N] for one key, or [..., N] for keys [..., 1].

    The partner of the n-th example is the n-th example in a random order. Padding is left out of both orders.
    """
    true, rows = batch.weight.flatten() > 0, random.fold(batch.example_keys.flatten(), key)
    shuffled = torch.where(true, random.uniform(random.fold(rows, 1)), 2.0).argsort(dim=-1, stable=True)
    return shuffled[..., (true.cumsum(0) - 1).clamp_min(0)]


def take_apart(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the content [N, F] (the normalized features) and the style: means and variances, [N, 1] each."""
    mean = features.mean(-1, keepdim=True)
    variance = features.var(-1, keepdim=True)
    return (features - mean) / (variance + _EPSILON).sqrt(), mean, variance


ALGORITHMS.register(
    AlgorithmEntry(
        name="SagNet",
        summary="Classify under randomized style, and unlearn features from which style alone predicts",
        paper="Nam et al., Reducing domain gap by reducing style bias, CVPR 2021",
        build=SagNet,
        compares_environments=False,
        hparams=(Hparam("sag_w_adv", 0.1, LogUniform(10, -2, 1), NON_NEGATIVE),),
    )
)
