"""GENIE: steps weighted by the signal-to-noise ratio of each parameter's gradient (Cho et al., ICML 2025)."""

from typing import NamedTuple

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry
from sandmask.algorithms._functions import Hparams, Metrics, State
from sandmask.functional import AdamState, EnvBatch, random
from sandmask.functional.ranks import Reads
from sandmask.hparams import BELOW_ONE, NON_NEGATIVE, Choice, Hparam, LogUniform
from sandmask.networks import Network

BETA = 0.95
_EPSILON = 1e-8


class GENIE(Algorithm):
    """Update a random share 1 - p of the parameters by w <- w - a u / (1 - p), where u = k q m + (1 - k) n.

    There is no Adam. m is a moving average of the gradient with weight decay, and v one of its square (beta = 0.95,
    divided by c = 1 - beta^t). The other variables are:

    - s2 = (v - m^2) / (1 - r), the variance over time (1e-8 if not positive), where
      r = (1 - beta) (2 - c) / ((1 + beta) c);
    - q = 1 / (1 + r s2 / (m^2 + 1e-8)), the share of m^2 that is signal;
    - k = tanh(min(1 / s2, 10)), which depends on the scale of the gradients, as the released SAND-mask does;
    - n ~ N(0, b^2), where b = sum k q |m| / sum k in each tensor.

    a is `convergence_rate`, which replaces `lr`, and p is `update_drop`. This follows the released code; the ranges of
    hyperparameters are ours.
    """

    reads: Reads = "examples"

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        gradient, loss = self.risk_gradient(state["params"], batch, hparams)
        averages = averaged(state["adam"], gradient + hparams["weight_decay"] * state["params"])
        params = moved(state["params"], signal(averages), self.network, hparams, key)
        return {**state, "params": params, "adam": averages, "step": state["step"] + 1}, {"loss": loss}


class EnvironmentGENIE(Algorithm):
    """GENIE with a mean and a variance over environments instead of moving averages over steps.

    The update is the same, w <- w - a u / (1 - p) for a random share 1 - p of the parameters, where u = k q m +
    (1 - k) n. m is the mean of the environments' gradients, with weight decay, and s2 is their unbiased variance over
    environments (1e-8 where it is 0). A share r = 1 / E of s2 remains in m, so that
    q = 1 / (1 + s2 / (E (m^2 + 1e-8))). k = tanh(min(1 / s2, 10)) and n are as in GENIE.

    Each step uses only the gradients of its minibatch. k depends on the scale of the gradients, as the released
    SAND-mask does.
    """

    reads: Reads = "environments"

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        risks, differentiate = self.risks_by(hparams), self.problem.differentiate
        moments, values = differentiate.environment_moments(risks, state["params"], batch)
        mean = moments.mean + hparams["weight_decay"] * state["params"]
        found = weighed(mean, moments.m2 / max(moments.count - 1, 1), 1.0 / moments.count)
        params = moved(state["params"], found, self.network, hparams, key)
        return {**state, "params": params, "step": state["step"] + 1}, {"loss": values.mean()}


class Signal(NamedTuple):
    """The signal and the weight of every parameter."""

    mean: Tensor  # q m
    trust: Tensor  # k


def averaged(averages: AdamState, gradient: Tensor) -> AdamState:
    """Return the moving averages after one more gradient."""
    mean = BETA * averages.mean + (1.0 - BETA) * gradient
    square = BETA * averages.square + (1.0 - BETA) * gradient.square()
    return AdamState(mean, square, averages.count + 1.0)


def signal(averages: AdamState) -> Signal:
    """Return q m and k for moving averages."""
    correction = 1.0 - BETA**averages.count
    mean, square = averages.mean / correction, averages.square / correction
    left = (1.0 - BETA) * (2.0 - correction) / ((1.0 + BETA) * correction)  # share of s2 in the average
    several = averages.count > 1.5  # for a single gradient, the variance is 0 and `left` is 1
    scatter = (square - mean.square()) / torch.where(several, 1.0 - left, 1.0)
    return weighed(mean, torch.where(several, scatter, 0.0), left)


def weighed(mean: Tensor, variance: Tensor, left: Tensor | float) -> Signal:
    """Return q m and k for means and variances, where `left` is the share of the variance that is left in the mean."""
    variance = torch.where(variance > 0, variance, _EPSILON)
    trust = torch.tanh((1.0 / variance).clamp_max(10.0))
    return Signal(mean / (1.0 + left * variance / (mean.square() + _EPSILON)), trust)


def moved(params: Tensor, found: Signal, network: Network, hparams: Hparams, key: Tensor) -> Tensor:
    """Return the parameters after the update, which leaves out a random share of them."""
    noise = random.normal(random.fold(key, 0), len(params))
    sizes = [slot.numel for slot in network.slots]
    pieces = zip(*(torch.split(each, sizes) for each in (*found, noise)), strict=True)
    update = torch.cat([_with_noise(mean, trust, normal) for mean, trust, normal in pieces])
    drop = hparams["update_drop"]
    kept = random.uniform(random.fold(key, 1), len(params)) >= drop
    return params - hparams["convergence_rate"] / (1.0 - drop) * torch.where(kept, update, 0.0)


def _with_noise(mean: Tensor, trust: Tensor, normal: Tensor) -> Tensor:
    """Return k q m + (1 - k) n for one tensor."""
    size = (trust * mean.abs()).sum() / trust.sum().clamp_min(_EPSILON)
    return trust * mean + (1.0 - trust) * size * normal


HPARAMS = (
    Hparam("convergence_rate", 0.015, LogUniform(10, -2.5, -1.5), NON_NEGATIVE),
    Hparam("update_drop", 0.4, Choice(0.0, 0.2, 0.4), BELOW_ONE),
)
PAPER = "Cho et al., One-step generalization ratio guided optimization for domain generalization, ICML 2025"

ALGORITHMS.register(
    AlgorithmEntry(
        name="GENIE",
        summary="Weight each parameter's step by the signal-to-noise ratio of its gradient over time",
        paper=PAPER,
        build=GENIE,
        compares_environments=False,
        hparams=HPARAMS,
    )
)
ALGORITHMS.register(
    AlgorithmEntry(
        name="GENIE-environments",
        summary="GENIE with the signal-to-noise ratio over environments instead of time",
        paper=f"a variant of ours; {PAPER}",
        build=EnvironmentGENIE,
        hparams=HPARAMS,
    )
)
