"""Types, and functions that several methods use: losses, Adam steps, parts of networks, pairs of examples."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask.functional import AdamState, EnvBatch, FlatModule, adam_init, adam_step
from sandmask.hparams import NON_NEGATIVE, Distribution, Hparam, seed_hash
from sandmask.networks import Network

State = dict[str, Any]  # a tree of tensors, with at least "params" (flat vector) and "step"
Metrics = dict[str, Tensor]  # name -> 0-dimensional tensor, with at least "loss"; "diagnostics" is a vector
Hparams = Mapping[str, Tensor]  # name -> 0-dimensional tensor


def descend(state: State, gradient: Tensor, adam: Any, hparams: Hparams) -> State:
    """Return the entries of the state that an Adam step along `gradient` changes.

    :param state: the run's state.
    :param gradient: gradient of the flat parameter vector.
    :param adam: Adam's state.
    :param hparams: hyperparameters of the run.
    """
    params, adam = adam_update(state["params"], gradient, adam, hparams)
    return {"params": params, "adam": adam, "step": state["step"] + 1}


def adam_update(params: Tensor, gradient: Tensor, adam: AdamState, hparams: Hparams) -> tuple[Tensor, AdamState]:
    """Take an Adam step with a run's hyperparameters.

    Uses `lr` and `weight_decay`, and `adam_beta1` and `decoupled_decay` if the run has them.

    :param params: flat vector of parameters.
    :param gradient: gradient of the same shape.
    :param adam: Adam's state.
    :param hparams: hyperparameters of the run.
    :return: new parameters and state.
    """
    betas = (hparams.get("adam_beta1", 0.9), 0.999)
    decoupled = hparams.get("decoupled_decay", 0.0)
    return adam_step(params, gradient, adam, hparams["lr"], hparams["weight_decay"], betas, decoupled)


def change_step(
    name: str, default: float, draw: Distribution, recipe: tuple[float, Distribution]
) -> tuple[Hparam, Hparam]:
    """Return the rows of a hyperparameter that is a step at which a method changes, such as the start of a penalty.

    `recipe` has the default and the distribution for tabular data in the space "recipe", in which runs have a fifth of
    DomainBed's steps.
    """
    row = Hparam(name, default, draw, NON_NEGATIVE, step=True)
    return row, replace(row, default=recipe[0], draw=recipe[1], scope="tabular", space="recipe")


def switched(state: State, hparams: Hparams, at: str, after: str, before: float = 0.0) -> Tensor:
    """Return the hyperparameter `after` from step `at` (also a hyperparameter) on, and the number `before` earlier."""
    return torch.where(state["step"] >= hparams[at], hparams[after], before)


def trained(name: str, module: FlatModule, seed: int) -> State:
    """Return the entries of the state for another network with its own Adam: `name` and `<name>_adam`."""
    vector = module.init(seed_hash(seed, name))
    return {name: vector, f"{name}_adam": adam_init(vector)}


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of every example.

    :param logits: `[..., C]`.
    :param y: labels `[...]`.
    :return: losses `[...]`.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    return losses.view(y.shape)


def one_hot(labels: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return labels [...] as one-hot rows [..., n]."""
    return (labels.unsqueeze(-1) == torch.arange(n, device=labels.device)).to(dtype)


def environment_risks(logits: Tensor, batch: EnvBatch) -> Tensor:
    """Return the mean cross-entropy of each environment.

    :param logits: `[E, B, C]`.
    :param batch: batch with the labels.
    :return: risks `[E]`.
    """
    return batch.mean(cross_entropy(logits, batch.y))


class Parts:
    """Splits a network's flat vector into the featurizer's part and the classifier's part, which is at the end."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._slots = [slot for slot in network.slots if slot.name.startswith("classifier")]
        assert tuple(self._slots) == network.slots[-len(self._slots) :]
        n_head = sum(slot.numel for slot in self._slots)
        self._sizes = [network.numel - n_head, n_head]

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the featurizer's part and the classifier's part."""
        featurizer, head = torch.split(vector, self._sizes)
        return featurizer, head

    def classify(self, head: Tensor, features: Tensor) -> Tensor:
        """Return the logits of features, with the classifier's part `head`."""
        pieces = torch.split(head, [slot.numel for slot in self._slots])
        params = {slot.name: slot.read(piece) for slot, piece in zip(self._slots, pieces, strict=True)}
        return self._network.classify(params, features)


class Pairs(NamedTuple):
    """Properties of all pairs (i, j) of examples, [N, N]."""

    other: Tensor  # i and j are different examples, and neither is padding
    same_class: Tensor
    same_environment: Tensor


def pairs_of(batch: EnvBatch) -> Pairs:
    """Return the properties of the pairs of a batch."""
    true, y = batch.weight.flatten() > 0, batch.y.flatten()
    numbers, environments = torch.arange(len(y), device=y.device), batch.environments.flatten()
    other = true & true.unsqueeze(-1) & (numbers != numbers.unsqueeze(-1))
    return Pairs(other, y == y.unsqueeze(-1), environments == environments.unsqueeze(-1))
