"""T3A: a classifier that adapts to unlabelled test examples (Iwasawa and Matsuo, NeurIPS 2021).

The features of test examples arrive in minibatches. Every feature becomes a support of the class that the classifier
predicts; the rows of the classifier's weights are the first supports. Of each class, the supports with the smallest
entropies of that prediction are kept. An example is assigned to the class whose prototype, the normalized sum of the
normalized supports, has the largest inner product with its features.
"""

from collections.abc import Iterator
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


class Classified:
    """The features of all examples of a dataset, and what the classifier of a trained model predicts from them.

    :param algorithm: the algorithm, with a linear classifier.
    :param state: its state.
    :param dataset: the dataset, on the device of the state.
    :param spec: the spec of the run.
    """

    @torch.no_grad()
    def __init__(self, algorithm: Algorithm, state: State, dataset: Dataset, spec: RunSpec) -> None:
        network, params = algorithm.network, algorithm.network.unflatten(state["params"])
        chunks = torch.split(torch.arange(len(dataset.labels), device=dataset.labels.device), 4 * BATCH)
        self._features = torch.cat([network.features(params, x) for x in dataset.batches(chunks)])
        self._weight = params["classifier.weight"]
        self._logits, self._of_weight = (network.classify(params, x) for x in (self._features, self._weight))
        self._dataset, self._spec = dataset, spec

    def adapted(self, supports: int) -> TensorDataset:
        """The logits of all examples, as a dataset. The classifier adapts to each "in" and "out" split by itself.

        :param supports: number of supports of each class; 0 is all.
        """
        logits = torch.empty_like(self._logits)
        for members in self._splits():
            own = members.to(logits.device)
            logits[own] = t3a(self._features[own], self._logits[own], self._weight, self._of_weight, supports)
        data, bounds = self._dataset, self._dataset.bounds
        parts = [(logits[i:j], data.labels[i:j]) for i, j in pairwise(bounds)]
        adapted = TensorDataset(data.name, data.environments, data.classes, parts)
        adapted.splits = data.splits
        return adapted

    def _splits(self) -> Iterator[Tensor]:
        """The examples of each split, in random order: datasets may be sorted by class."""
        generator = torch.Generator().manual_seed(self._spec.trial_seed)
        for env in range(len(self._dataset.environments)):
            for members in split_environment(self._dataset, env, self._spec.trial_seed, holdout_fraction(self._spec)):
                yield members[torch.randperm(len(members), generator=generator)]


@torch.no_grad()
def t3a(features: Tensor, logits: Tensor, weight: Tensor, of_weight: Tensor, supports: int) -> Tensor:
    """Return the logits [N, C] of examples that arrive in minibatches.

    :param features: features `[N, F]`.
    :param logits: what the classifier predicts from them, `[N, C]`.
    :param weight: the classifier's weight `[C, F]`.
    :param of_weight: what the classifier predicts from the rows of its weight, `[C, C]`.
    :param supports: number of supports of each class that are kept; 0 is all.
    """
    kept, classes, entropies = F.normalize(weight), of_weight.argmax(1), _entropies(of_weight)
    found = []
    for z, p in zip(torch.split(features, BATCH), torch.split(logits, BATCH), strict=True):
        kept = torch.cat([kept, F.normalize(z)])
        classes = torch.cat([classes, p.argmax(1)])
        if supports:
            entropies = torch.cat([entropies, _entropies(p)])
            chosen = _surest(classes, entropies, len(weight), supports)
            kept, classes, entropies = kept[chosen], classes[chosen], entropies[chosen]
        sums = torch.zeros_like(weight).index_add(0, classes, kept)
        found.append(z @ F.normalize(sums).T)
        if not supports:  # no support will be removed, so that the sum of each class replaces them
            kept, classes = sums, torch.arange(len(weight), device=classes.device)
    return torch.cat(found)


def _entropies(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def _surest(classes: Tensor, entropies: Tensor, n_classes: int, count: int) -> Tensor:
    """The numbers of the `count` examples of each class with the smallest entropies."""
    order = entropies.argsort(stable=True)
    ranks = F.one_hot(classes[order], n_classes).cumsum(0).gather(1, classes[order].unsqueeze(1)).squeeze(1)
    return order[ranks <= count]
