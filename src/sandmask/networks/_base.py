"""A featurizer and a linear classifier as one pure function of a flat parameter vector."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sandmask.functional.dropout import Dropout
from sandmask.functional.flat import FlatModule, Params


class Featurizer(nn.Module):
    """Maps inputs `[N, *input_shape]` to features `[N, n_features]`; dropout, where it has any, is passed in."""

    n_features: int

    def forward(self, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """The features."""
        raise TypeError(f"{type(self).__name__} should define forward(x, drop)")


class _Parts(nn.Module):
    """Featurizer and classifier behind one `forward`, which is what `functional_call` can call."""

    def __init__(self, featurizer: Featurizer, n_classes: int, extra_features: int) -> None:
        super().__init__()
        self.featurizer = featurizer
        self.classifier = nn.Linear(featurizer.n_features + extra_features, n_classes)

    def forward(self, part: str, x: Tensor, drop: Dropout | None = None) -> Tensor:
        if part == "features":
            features: Tensor = self.featurizer(x, drop)
            return features
        logits: Tensor = self.classifier(x)
        return logits


class Network:
    """The model that algorithms train. Parameters are passed in: `params = network.unflatten(vector)`.

    `extra_features` widens the classifier's input for methods that append something to the features.
    """

    def __init__(self, featurizer: Callable[[], Featurizer], n_classes: int, extra_features: int = 0) -> None:
        self._flat = FlatModule(lambda: _Parts(featurizer(), n_classes, extra_features))
        widths = {slot.name: slot.shape for slot in self._flat.slots}
        self.n_features = widths["classifier.weight"][1] - extra_features
        self.n_classes = n_classes
        self.slots = self._flat.slots
        self.numel = self._flat.numel
        self.init = self._flat.init
        self.unflatten = self._flat.unflatten

    def to(self, device: torch.device) -> "Network":
        """Move the network's constants (frozen batch-norm statistics)."""
        self._flat.to(device)
        return self

    def features(self, params: Params, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """Features [N, n_features] of inputs [N, ...]."""
        return self._flat(params, "features", x, drop)

    def classify(self, params: Params, features: Tensor) -> Tensor:
        """Logits [N, n_classes] of features."""
        return self._flat(params, "classify", features)

    def logits(self, params: Params, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """Logits [N, n_classes] of inputs."""
        return self.classify(params, self.features(params, x, drop))
