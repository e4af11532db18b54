"""Types of steps, and functions that methods share: losses, steps of Adam, parts of networks, pairs of examples."""

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
    """The rows of a step at which a method changes, such as the start of a penalty.

    `recipe` is its default and draw for MLPs in the space "recipe", whose runs have a fifth of DomainBed's steps.
    """
    row = Hparam(name, default, draw, NON_NEGATIVE, step=True)
    return row, replace(row, default=recipe[0], draw=recipe[1], scope="tabular", space="recipe")


def switched(state: State, hparams: Hparams, at: str, after: str, before: float = 0.0) -> Tensor:
    """The hyperparameter `after` from the step `at` (another hyperparameter) on, and the number `before` until then."""
    return torch.where(state["step"] >= hparams[at], hparams[after], before)


def trained(name: str, module: FlatModule, seed: int) -> State:
    """The entries of the state for a further network with an Adam of its own: `name` and `<name>_adam`."""
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
    """Labels [...] as rows [..., n]."""
    return (labels.unsqueeze(-1) == torch.arange(n, device=labels.device)).to(dtype)


def environment_risks(logits: Tensor, batch: EnvBatch) -> Tensor:
    """Return the mean cross-entropy of each environment.

    :param logits: `[E, B, C]`.
    :param batch: batch with the labels.
    :return: risks `[E]`.
    """
    return batch.mean(cross_entropy(logits, batch.y))


class Parts:
    """A network's flat vector as two: the featurizer's, and the classifier's, which is at its end."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._slots = [slot for slot in network.slots if slot.name.startswith("classifier")]
        assert tuple(self._slots) == network.slots[-len(self._slots) :]
        n_head = sum(slot.numel for slot in self._slots)
        self._sizes = [network.numel - n_head, n_head]

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The featurizer's part and the classifier's."""
        featurizer, head = torch.split(vector, self._sizes)
        return featurizer, head

    def classify(self, head: Tensor, features: Tensor) -> Tensor:
        """Logits of features, by a classifier given as a vector."""
        pieces = torch.split(head, [slot.numel for slot in self._slots])
        params = {slot.name: slot.read(piece) for slot, piece in zip(self._slots, pieces, strict=True)}
        return self._network.classify(params, features)


class Pairs(NamedTuple):
    """Properties of pairs of examples, [N, N], without padding."""

    other: Tensor  # j is another example than i
    same_class: Tensor
    same_environment: Tensor


def pairs_of(batch: EnvBatch) -> Pairs:
    """The pairs of a batch."""
    true, y = batch.weight.flatten() > 0, batch.y.flatten()
    numbers, environments = torch.arange(len(y), device=y.device), batch.environments.flatten()
    other = true & true.unsqueeze(-1) & (numbers != numbers.unsqueeze(-1))
    return Pairs(other, y == y.unsqueeze(-1), environments == environments.unsqueeze(-1))
