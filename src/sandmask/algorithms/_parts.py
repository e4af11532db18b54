"""A network's flat vector as two: the featurizer's and the classifier's."""

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask.networks import Network


class Parts:
    """The classifier's place in a network's vector, which is its end."""

    def __init__(self, network: Network) -> None:
        weight, bias = network.slots[-2:]
        assert (weight.name, bias.name) == ("classifier.weight", "classifier.bias")
        self.n_head = weight.numel + bias.numel
        self._shape = weight.shape
        self._sizes = [network.numel - self.n_head, self.n_head]

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The featurizer's part and the classifier's."""
        featurizer, head = torch.split(vector, self._sizes)
        return featurizer, head

    def classify(self, head: Tensor, features: Tensor) -> Tensor:
        """Logits of features, by a classifier given as a vector."""
        weight, bias = torch.split(head, [self._shape.numel(), self._shape[0]])
        return F.linear(features, weight.view(self._shape), bias)
