"""SelfReg: self-supervised contrastive regularization (Kim et al., ICCV 2021)."""

import itertools
from functools import partial

import torch
from torch import Tensor, nn

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry, Problem
from sandmask.algorithms._functions import Hparams, Metrics, State, environment_risks, trained
from sandmask.functional import EnvBatch, FlatModule, random
from sandmask.functional.ranks import Reads

_FEATURES = 0.3  # weight of the features relative to the logits
_EPSILON = 1e-5


class SelfReg(Algorithm):
    """Minimize R + min(R, 1) D, where D compares examples of one class, R = mean_e R_e, and min(R, 1) is a constant.

    D = lam [MSE(o, o_a) + 0.3 MSE(z, p_a)] + (1 - lam) [MSE(o, o_ab) + 0.3 MSE(z, p_ab)] for logits o, features z and
    their projections p = g(z). o_a and p_a are those of a partner a of the same class and any environment. o_ab = lam
    o_a + (1 - lam) o_b for a second partner b, and likewise p_ab. Partners are random permutations within classes.
    lam ~ Beta(1/2, 1/2) is one number per step.

    g has three linear layers, each followed by batch-norm, and ReLUs between them. Batch-norm uses the statistics of
    the minibatch. g is trained with the rest. (DomainBed creates g after the optimizer, and so never trains it.)
    """

    reads: Reads = "examples"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.projection = FlatModule(partial(Projection, self.network.n_features))

    def extra_state(self, seed: int) -> State:
        """Return the projection and its optimizer."""
        return trained("projection", self.projection, seed)

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update of the network and of the projection."""

        def objective(vector: Tensor, projection: Tensor) -> tuple[Tensor, tuple[()]]:
            return self._objective(vector, projection, batch, hparams, key), ()

        state, loss, _ = self.descend_together(state, objective, {"params": hparams, "projection": hparams})
        return state, {"loss": loss}

    def _objective(self, vector: Tensor, projection: Tensor, batch: EnvBatch, hparams: Hparams, key: Tensor) -> Tensor:
        params = self.network.unflatten(vector)
        z = self.network.features(params, batch.inputs, self.dropout(batch, hparams))
        o = self.network.classify(params, z)
        risk = environment_risks(batch.split(o), batch).mean()
        share = batch.weight.flatten().to(z.dtype)
        share = share / share.sum()
        p = self.projection(self.projection.unflatten(projection), z, share)
        lam = random.symmetric_beta(random.fold(key, 0), torch.full((), 0.5, device=key.device))
        first, second = (partners(batch, self.problem.n_classes, random.fold(key, turn)) for turn in (1, 2))

        def distance(of_logits: Tensor, of_features: Tensor) -> Tensor:
            each = (o - of_logits).square().mean(-1) + _FEATURES * (z - of_features).square().mean(-1)
            return (share * each).sum()

        nearer = distance(o[first], p[first])
        mixed = distance(*(lam * values[first] + (1.0 - lam) * values[second] for values in (o, p)))
        return risk + risk.detach().clamp_max(1.0) * (lam * nearer + (1.0 - lam) * mixed)


class Projection(nn.Module):
    """The projection g of features [N, F] -> [N, F]. `share` has the weights of examples in batch-norm's statistics."""

    def __init__(self, n_features: int) -> None:
        super().__init__()
        hidden = n_features if n_features == 2048 else 2 * n_features
        sizes = [n_features, hidden, hidden, n_features]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.scales = nn.ParameterList(torch.ones(size) for size in sizes[1:])
        self.offsets = nn.ParameterList(torch.zeros(size) for size in sizes[1:])

    def forward(self, x: Tensor, share: Tensor) -> Tensor:
        """Return the projections."""
        for place, layer in enumerate(self.layers):
            x = x.relu() if place else x
            x = _normalized(layer(x), share.unsqueeze(-1)) * self.scales[place] + self.offsets[place]
        return x


def _normalized(x: Tensor, share: Tensor) -> Tensor:
    mean = (share * x).sum(0)
    variance = (share * (x - mean).square()).sum(0)
    return (x - mean) / (variance + _EPSILON).sqrt()


def partners(batch: EnvBatch, n_classes: int, key: Tensor) -> Tensor:
    """Return the index of a partner of the same class for every example, by random permutations within classes."""
    true = batch.weight.flatten() > 0
    classes = torch.where(true, batch.y.flatten(), n_classes)  # padding is a class of its own
    noise = (random.uniform(random.fold(batch.example_keys.flatten(), key)) * 2**24).long()
    in_order, shuffled = classes.argsort(stable=True), (classes * 2**24 + noise).argsort(stable=True)
    return shuffled[in_order.argsort(stable=True)]


ALGORITHMS.register(
    AlgorithmEntry(
        name="SelfReg",
        summary="Pull together the logits and features of examples of one class from any environment",
        paper="Kim et al., SelfReg: self-supervised contrastive regularization for domain generalization, ICCV 2021",
        build=SelfReg,
        compares_environments=False,
    )
)
