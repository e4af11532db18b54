"""T3A: a classifier that adapts to unlabelled test examples (Iwasawa and Matsuo, NeurIPS 2021).

The features of test examples arrive in minibatches. Every feature becomes a support of the class that the classifier
predicts; the rows of the classifier's weights are the first supports. Of each class, the supports with the smallest
entropies of that prediction are kept. An example is assigned to the class whose prototype, the normalized sum of the
normalized supports, has the largest inner product with its features.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask.algorithms import Algorithm, State
from sandmask.datasets import Dataset, TensorDataset
from sandmask.records import RunSpec
from sandmask.training.sampling import holdout_fraction, split_environment

SUPPORTS = (1, 5, 20, 50, 100, 0)  # numbers of supports of each class that are tried; 0 is all
BATCH = 32  # examples that arrive together


@dataclass(frozen=True)
class Classified:
    """The features `[N, F]` of all examples of a dataset, and what a classifier predicts from them, `[N, C]`.

    `weight` is the weight of the classifier of the trained model, and `of_weight` what it predicts from its rows.
    """

    features: Tensor
    logits: Tensor
    weight: Tensor
    of_weight: Tensor
    dataset: Dataset
    spec: RunSpec

    @classmethod
    @torch.no_grad()
    def by(cls, algorithm: Algorithm, state: State, dataset: Dataset, spec: RunSpec) -> "Classified":
        """The features and logits of a trained model.

        :param algorithm: the algorithm, with a linear classifier.
        :param state: its state.
        :param dataset: the dataset, on the device of the state.
        :param spec: the spec of the run.
        """
        network, params = algorithm.network, algorithm.network.unflatten(state["params"])
        chunks = torch.split(torch.arange(len(dataset.labels), device=dataset.labels.device), 4 * BATCH)
        features = torch.cat([network.features(params, x) for x in dataset.batches(chunks)])
        weight = params["classifier.weight"]
        logits, of_weight = (network.classify(params, x) for x in (features, weight))
        return cls(features, logits, weight, of_weight, dataset, spec)

    def adapted(self, supports: int) -> TensorDataset:
        """The logits of all examples, as a dataset. The classifier adapts to each "in" and "out" split by itself.

        :param supports: number of supports of each class; 0 is all.
        """
        logits = torch.empty_like(self.logits)
        for members in self.splits():
            logits[members] = t3a(self.features[members], self.logits[members], self.weight, self.of_weight, supports)
        logits = logits.nan_to_num(0.0, 0.0, 0.0)  # features may overflow; inputs of datasets are finite
        data, bounds = self.dataset, self.dataset.bounds
        parts = [(logits[i:j], data.labels[i:j]) for i, j in pairwise(bounds)]
        adapted = TensorDataset(data.name, data.environments, data.classes, parts)
        adapted.splits = data.splits
        return adapted

    def splits(self) -> Iterator[Tensor]:
        """The examples of each split, in random order: datasets may be sorted by class."""
        generator, fraction = torch.Generator().manual_seed(self.spec.trial_seed), holdout_fraction(self.spec)
        for env in range(len(self.dataset.environments)):
            for members in split_environment(self.dataset, env, self.spec.trial_seed, fraction):
                yield members[torch.randperm(len(members), generator=generator)].to(self.logits.device)


@torch.no_grad()
def t3a(features: Tensor, logits: Tensor, weight: Tensor, of_weight: Tensor, supports: int) -> Tensor:
    """Return the logits [N, C] of examples that arrive in minibatches.

    :param features: features `[N, F]`.
    :param logits: what the classifier predicts from them, `[N, C]`.
    :param weight: the classifier's weight `[C, F]`.
    :param of_weight: what the classifier predicts from the rows of its weight, `[C, C]`.
    :param supports: number of supports of each class that are kept; 0 is all.
    """
    kept, classes, entropies = F.normalize(weight), of_weight.argmax(1), entropies_of(of_weight)
    found = []
    for z, p in zip(torch.split(features, BATCH), torch.split(logits, BATCH), strict=True):
        kept = torch.cat([kept, F.normalize(z)])
        classes = torch.cat([classes, p.argmax(1)])
        if supports:
            entropies = torch.cat([entropies, entropies_of(p)])
            chosen = _surest(classes, entropies, len(weight), supports)
            kept, classes, entropies = kept[chosen], classes[chosen], entropies[chosen]
        sums = torch.zeros_like(weight).index_add(0, classes, kept)
        found.append(z @ F.normalize(sums).T)
        if not supports:  # no support will be removed, so that the sum of each class replaces them
            kept, classes = sums, torch.arange(len(weight), device=classes.device)
    return torch.cat(found)


def entropies_of(logits: Tensor) -> Tensor:
    """The entropies [N] of predictions [N, C]."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def _surest(classes: Tensor, entropies: Tensor, n_classes: int, count: int) -> Tensor:
    """The numbers of the `count` examples of each class with the smallest entropies."""
    order = entropies.argsort(stable=True)
    ranks = F.one_hot(classes[order], n_classes).cumsum(0).gather(1, classes[order].unsqueeze(1)).squeeze(1)
    return order[ranks <= count]
