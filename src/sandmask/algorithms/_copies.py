"""A network with one copy of its parameters per environment, to split a gradient by environment."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.func import vmap

from sandmask.errors import SandmaskError
from sandmask.functional.across_processes import divided
from sandmask.functional.dense import Dropout
from sandmask.functional.flat import Params
from sandmask.networks import Network


class EnvironmentCopies(Network):
    """A network whose parameters are E vectors [E, P]. The rows of environment e use the e-th copy.

    The derivative of an objective J with respect to copy e is the part of the gradient that the examples of environment
    e contribute. If all E vectors are equal, the parts sum to the gradient of J with respect to that vector.
    """

    def __init__(self, network: Network) -> None:
        vars(self).update(vars(network))
        self._network = network

    def unflatten(self, vector: Tensor) -> Params:
        """Return the parameters of all copies."""
        unflatten = self._network.unflatten
        return _Copies(vmap(unflatten)(vector) if self.stacks else [unflatten(each) for each in vector])

    def features(self, params: Params, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """Return features [N, n_features] of inputs [N, ...], with the same number of rows for each environment."""
        return self._by_environment(self._network.features, params, x, drop)

    def logits(self, params: Params, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """Return logits [N, n_classes] of inputs [N, ...]."""
        return self._by_environment(self._network.logits, params, x, drop)

    def classify(self, params: Params, features: Tensor) -> Tensor:
        """Return logits of features [N, ...] or [E, B, ...]."""
        copies = _copies_of(params)
        rows = features if features.ndim > 2 else _split(features, len(copies))
        logits = self._each(lambda params, rows, _: self._network.classify(params, rows), copies, rows, None)
        return logits.view(*features.shape[:-1], -1)

    def _by_environment(self, function: Any, params: Params, x: Tensor, drop: Dropout | None) -> Tensor:
        copies = _copies_of(params)

        def of_one(params: Params, x: Tensor, keys: Tensor | None) -> Tensor:
            result: Tensor = function(params, x, None if keys is None or drop is None else Dropout(drop.rate, keys))
            return result

        def of_rows(x: Tensor, keys: Tensor | None) -> Tensor:
            return self._each(of_one, copies, x, keys)

        keys = None if drop is None else _split(drop.keys, len(copies))
        rows: Tensor = divided(of_rows, _split(x, len(copies)), keys, dim=1)
        return rows.flatten(0, 1)

    def _each(self, function: Any, copies: "_Copies", x: Tensor, keys: Tensor | None) -> Tensor:
        if isinstance(copies.kept, list):
            each = [None] * len(x) if keys is None else list(keys)
            return torch.stack([function(*args) for args in zip(copies.kept, x, each, strict=True)])
        results: Tensor = vmap(function, in_dims=(0, 0, None if keys is None else 0))(copies.kept, x, keys)
        return results


class _Copies(Params):
    """The parameters of all copies. Only the network reads them; any other access raises an error."""

    def __init__(self, kept: Params | list[Params]) -> None:
        super().__init__()
        self.kept = kept

    def __len__(self) -> int:
        return len(self.kept if isinstance(self.kept, list) else next(iter(self.kept.values())))

    def _refuse(self, *_: object) -> NoReturn:
        raise SandmaskError(
            "An objective that reads parameters itself, rather than through `self.network`, cannot be composed with a "
            "mask: its gradient cannot be split by environment."
        )

    __getitem__ = __iter__ = keys = values = items = get = _refuse


def _copies_of(params: Params) -> _Copies:
    assert isinstance(params, _Copies)
    return params


def _split(values: Tensor, n_envs: int) -> Tensor:
    """Reshape [E * B, ...] to [E, B, ...]."""
    return values.view(n_envs, -1, *values.shape[1:])
