"""A network's flat vector as two: the featurizer's and the classifier's."""

import torch
from torch import Tensor

from sandmask.networks import Network


class Parts:
    """The classifier's place in a network's vector, which is its end."""

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
