"""Style-agnostic networks: classify by content, and unlearn style."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry, Problem
from sandmask.algorithms._functions import Hparams, Metrics, Parts, State, adam_update, environment_risks
from sandmask.functional import EnvBatch, FlatModule, adam_init, random
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform, seed_hash

_EPSILON = 1e-5


class SagNet(Algorithm):
    """Three Adam steps in turn, on featurizer f, content head c and style head s:

    (f, c) by R(c(SR(f(x)))), then s by R(s(CR(f(x)))), then f by sag_w_adv CE(uniform, s(CR(f(x)))).

    The style of a feature vector is its mean and variance, its content the normalized rest (as in DomainBed's
    code; the paper takes both from feature maps). SR mixes an example's style with another's at a random
    ratio; CR gives it another's content, as a constant. Each of f, c, s has an Adam of its own.
    """

    linear_only = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        n_features, n_classes = self.network.n_features, problem.n_classes
        self.style = FlatModule(lambda: nn.Linear(n_features, n_classes))
        self.parts = Parts(self.network)

    def extra_state(self, seed: int) -> State:
        """The style head, and an optimizer for each part."""
        featurizer, content = self.parts.split(self.network.init(seed))
        style = self.style.init(seed_hash(seed, "style"))
        optimizers = {"adam": featurizer, "content_adam": content, "style_adam": style}
        return {"style": style, **{name: adam_init(part) for name, part in optimizers.items()}}

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update of each."""
        keys = [random.fold(key, turn) for turn in range(3)]
        state, content_loss = self._learn_content(state, batch, hparams, keys[0])
        state, style_loss = self._learn_style(state, batch, hparams, keys[1])
        state, adversarial_loss = self._unlearn_style(state, batch, hparams, keys[2])
        metrics = {"loss": content_loss, "style_loss": style_loss, "adversarial_loss": adversarial_loss}
        return {**state, "step": state["step"] + 1}, metrics

    def _learn_content(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Tensor]:
        exchange = Exchange(batch, key)

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

    def _learn_style(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Tensor]:
        swapped = Exchange(batch, key).swap_contents(self._features(state["params"], batch, hparams))

        def risk(vector: Tensor) -> tuple[Tensor, tuple[()]]:
            logits = self.style(self.style.unflatten(vector), swapped)
            return environment_risks(batch.split(logits), batch).mean(), ()

        gradient, loss, _ = self.problem.differentiate.gradient(risk, state["style"])
        style, adam = adam_update(state["style"], gradient, state["style_adam"], hparams)
        return {**state, "style": style, "style_adam": adam}, loss

    def _unlearn_style(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Tensor]:
        exchange = Exchange(batch, key)
        featurizer, content = self.parts.split(state["params"])

        def distance_to_uniform(vector: Tensor) -> tuple[Tensor, tuple[()]]:
            swapped = exchange.swap_contents(self._features(torch.cat([vector, content]), batch, hparams))
            logits = batch.split(self.style(self.style.unflatten(state["style"]), swapped))
            return hparams["sag_w_adv"] * batch.mean(-F.log_softmax(logits, dim=-1).mean(-1)).mean(), ()

        gradient, loss, _ = self.problem.differentiate.gradient(distance_to_uniform, featurizer)
        featurizer, adam = adam_update(featurizer, gradient, state["adam"], hparams)
        return {**state, "params": torch.cat([featurizer, content]), "adam": adam}, loss

    def _features(self, vector: Tensor, batch: EnvBatch, hparams: Hparams) -> Tensor:
        params = self.network.unflatten(vector)
        return self.network.features(params, batch.inputs, self.dropout(batch, hparams))


class Exchange:
    """A random partner for every example of a batch, and a ratio, both drawn by the examples' own keys."""

    def __init__(self, batch: EnvBatch, key: Tensor) -> None:
        rows = random.fold(batch.example_keys.flatten(), key)
        true = batch.weight.flatten() > 0
        self.ratio = random.uniform(random.fold(rows, 0)).unsqueeze(-1)
        # The n-th true example is given the n-th of the true examples in random order: padding takes no part.
        shuffled = torch.where(true, random.uniform(random.fold(rows, 1)), 2.0).argsort(stable=True)
        self.partner = shuffled[(true.cumsum(0) - 1).clamp_min(0)]

    def mix_styles(self, features: Tensor) -> Tensor:
        """Features [N, F] whose styles lie between their own and their partner's."""
        content, mean, variance = take_apart(features)
        mean = self.ratio * mean + (1.0 - self.ratio) * mean[self.partner]
        variance = self.ratio * variance + (1.0 - self.ratio) * variance[self.partner]
        return content * (variance + _EPSILON).sqrt() + mean

    def swap_contents(self, features: Tensor) -> Tensor:
        """Features [N, F] of their own style and their partner's content, which counts as a constant."""
        content, mean, variance = take_apart(features)
        return content[self.partner].detach() * (variance + _EPSILON).sqrt() + mean


def take_apart(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Content [N, F], the normalized features, and style: their means and variances, [N, 1] each."""
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
