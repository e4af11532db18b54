"""The multi-layer perceptron of the Spirals experiments."""

import itertools

from torch import Tensor, nn

from sandmask.functional.dense import affine, dense
from sandmask.functional.dropout import Dropout
from sandmask.networks._base import Featurizer


class MLP(Featurizer):
    """input -> width, `depth - 2` hidden layers, width -> `n_outputs`; dropout and ReLU between them."""

    def __init__(self, n_inputs: int, width: int, depth: int, n_outputs: int | None = None) -> None:
        super().__init__()
        self.n_features = width if n_outputs is None else n_outputs
        sizes = [n_inputs] + [width] * (depth - 1) + [self.n_features]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in itertools.pairwise(sizes))

    @property
    def last(self) -> nn.Linear:
        """The layer without a ReLU."""
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        return last

    def hidden(self, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """The input of the last layer."""
        x = x.flatten(1)
        for site, layer in enumerate(self.layers[:-1]):
            assert isinstance(layer, nn.Linear)
            x = dense(x, layer.weight, layer.bias, drop, site)
        return x

    def forward(self, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """The features."""
        return affine(self.hidden(x, drop), self.last.weight, self.last.bias)
