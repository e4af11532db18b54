"""Uniformly distributed feature representations (Krishnamachari et al., TMLR 2024)."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry, Problem
from sandmask.algorithms._functions import Hparams, Metrics, State, adam_update, environment_risks, trained
from sandmask.functional import EnvBatch, FlatModule, random
from sandmask.functional.ranks import Reads
from sandmask.hparams import NON_NEGATIVE, Bounds, Choice, Hparam, LogUniform, Uniform

WIDTH, MOST_LAYERS = 100, 3


class URM(Algorithm):
    """Learn features z = a(f(x)) that a discriminator d cannot tell from uniform noise n.

    The featurizer f and the classifier minimize R + lambda BCE(d(z), 1). Then d minimizes BCE(d(n), 1) + lambda
    BCE(d(z), 0), for the features z from before the step of f.

    R = mean_e R_e, BCE is the binary cross-entropy, and lambda is `urm_adv_lambda`. If `urm_generator_output` is 0, a
    is tanh and n is uniform in (-1, 1); if it is 1, a is ReLU and n is uniform in (0, 1). The activation a is part of
    the model. d has a first layer and `urm_discriminator_hidden_layers` hidden layers, of width 100 and with leaky
    ReLUs. Both have an Adam; the learning rate of d is `urm_discriminator_lr`.
    """

    reads: Reads = "examples"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.discriminator = FlatModule(partial(UniformDiscriminator, self.network.n_features))

    def extra_state(self, seed: int) -> State:
        """Return the discriminator, its optimizer, and the activation of the model, which the first step sets."""
        return {**trained("discriminator", self.discriminator, seed), "activation": torch.zeros(())}

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update of the model, then one of the discriminator."""
        differentiate, weight = self.problem.differentiate, hparams["urm_adv_lambda"]
        activation = hparams["urm_generator_output"]
        share = batch.weight.flatten().to(state["params"].dtype)
        share = share / share.sum()

        def judged(vector: Tensor, z: Tensor, real: bool) -> Tensor:
            """Return BCE(d(z), real)."""
            params = self.discriminator.unflatten(vector)
            logits = self.discriminator(params, z, hparams["urm_discriminator_hidden_layers"])
            return (share * F.softplus(-logits if real else logits)).sum()

        def of_model(vector: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            params = self.network.unflatten(vector)
            z = activated(self.network.features(params, batch.inputs, self.dropout(batch, hparams)), activation)
            risk = environment_risks(batch.split(self.network.classify(params, z)), batch).mean()
            return risk + weight * judged(state["discriminator"], z, real=True), (risk, z)

        gradient, loss, (_, z) = differentiate.gradient(of_model, state["params"])
        params, adam = adam_update(state["params"], gradient, state["adam"], hparams)
        uniform = random.uniform(random.fold(batch.example_keys.flatten(), key), z.shape[-1]).to(z.dtype)
        noise = torch.where(activation > 0, uniform, 2.0 * uniform - 1.0)

        def of_discriminator(vector: Tensor) -> tuple[Tensor, tuple[()]]:
            return judged(vector, noise, real=True) + weight * judged(vector, z, real=False), ()

        gradient, d_loss, _ = differentiate.gradient(of_discriminator, state["discriminator"])
        its_hparams = {**hparams, "lr": hparams["urm_discriminator_lr"]}
        vector, d_adam = adam_update(state["discriminator"], gradient, state["discriminator_adam"], its_hparams)
        changes = {"params": params, "adam": adam, "discriminator": vector, "discriminator_adam": d_adam}
        changes["activation"] = activation.to(state["activation"].dtype)
        return {**state, **changes, "step": state["step"] + 1}, {"loss": loss, "discriminator_loss": d_loss}

    def predict(self, state: State, x: Tensor) -> Tensor:
        """Return the logits of the activated features."""
        params = self.network.unflatten(state["params"])
        return self.network.classify(params, activated(self.network.features(params, x), state["activation"]))


def activated(features: Tensor, activation: Tensor) -> Tensor:
    """Return tanh of the features if `activation` is 0, and ReLU of the features if it is 1."""
    return torch.where(activation > 0, features.relu(), features.tanh())


class UniformDiscriminator(nn.Module):
    """Maps features to one logit per row. How many hidden layers are used is given by a tensor, so that runs stack."""

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.first = nn.Linear(n_features, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(MOST_LAYERS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, z: Tensor, n_hidden: Tensor) -> Tensor:
        """Return logits [N]."""
        x = F.leaky_relu(self.first(z))
        for place, layer in enumerate(self.hidden):
            x = torch.where(place < n_hidden, F.leaky_relu(layer(x)), x)
        logits: Tensor = self.last(x)
        return logits.squeeze(-1)


ALGORITHMS.register(
    AlgorithmEntry(
        name="URM",
        summary="Learn features that a discriminator cannot tell from uniform noise",
        paper="Krishnamachari et al., Uniformly distributed feature representations for fair and robust learning, "
        "TMLR 2024",
        build=URM,
        compares_environments=False,
        hparams=(
            Hparam("urm_adv_lambda", 0.1, Uniform(0, 0.2), NON_NEGATIVE),
            Hparam("urm_discriminator_hidden_layers", 1, Choice(1, 2, 3), Bounds(0, MOST_LAYERS)),
            Hparam("urm_generator_output", 0, Choice(0, 1), Bounds(0, 1)),
            Hparam("urm_discriminator_lr", 1e-3, LogUniform(10, -5.5, -3.5), NON_NEGATIVE),
            Hparam("urm_discriminator_lr", 5e-5, LogUniform(10, -6, -4.5), NON_NEGATIVE, scope="image"),
        ),
    )
)
