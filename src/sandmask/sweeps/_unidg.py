"""UniDG: T3A with a network that trains on the unlabelled test examples (Zhang et al., 2023, arXiv 2310.10008).

The network takes one Adam step per minibatch. It starts each split with the weights of the trained model. With the
features z of the minibatch, the features z0 of the trained model and the predictions p, it minimizes

    mean entropy(p) + penalty * mean(max((z - z0)^2 - 0.1, 0)).

The predictions are those of T3A with the features from before the step. As in the released code, the learning rate is
0.1 or 1 times that of the training, and the penalty 0.1 or 1. The released code also applies the weight decay of the
training, and keeps what one split has changed for the next.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from sandmask.algorithms import Algorithm, State
from sandmask.functional import adam_init, adam_step
from sandmask.sweeps._t3a import BATCH, Classified, entropies_of

RATES = (0.1, 1.0)  # learning rates that are tried, relative to that of the training
PENALTIES = (1.0, 0.1)
MARGIN = 0.1  # the squared change of a feature that costs nothing


def tuned(algorithm: Algorithm, state: State, plain: Classified) -> Iterator[tuple[dict[str, float], Classified]]:
    """Yield the features and logits of the network that trains, for each rate and penalty, with these two.

    :param algorithm: the algorithm, with a linear classifier.
    :param state: its state.
    :param plain: features and logits of the trained model.
    """
    lr = plain.spec.hparams["lr"]
    for rate, penalty in product(RATES, PENALTIES):
        features, logits = torch.empty_like(plain.features), torch.empty_like(plain.logits)
        for members in plain.splits():
            found = _tune(algorithm, state["params"], plain, members, rate * lr, penalty)
            features[members], logits[members] = map(torch.cat, zip(*found, strict=True))
        yield {"unidg_rate": rate, "unidg_penalty": penalty}, replace(plain, features=features, logits=logits)


def _tune(
    algorithm: Algorithm, params: Tensor, plain: Classified, members: Tensor, lr: float, penalty: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the features and logits of the minibatches of a split, each from before the step on it."""
    adam, chunks = adam_init(params), torch.split(members, BATCH)
    for chunk, x in zip(chunks, plain.dataset.batches(chunks), strict=True):
        with torch.enable_grad():
            leaf = params.detach().requires_grad_()
            named = algorithm.network.unflatten(leaf)
            z = algorithm.network.features(named, x)
            p = algorithm.network.classify(named, z)
            moved = ((z - plain.features[chunk]).square() - MARGIN).clamp_min(0.0).mean()
            (gradient,) = torch.autograd.grad(entropies_of(p).mean() + penalty * moved, leaf)
        yield z.detach(), p.detach()
        with torch.no_grad():
            params, adam = adam_step(params, gradient, adam, lr)
