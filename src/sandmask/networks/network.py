"""A featurizer and a classifier as one pure function of a flat parameter vector."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask._physical import is_traced
from sandmask.errors import SandmaskError
from sandmask.functional.across_processes import divided
from sandmask.functional.compiling import Compiled
from sandmask.functional.dense import Dropout
from sandmask.functional.flat import BATCH_NORM, FlatModule, Params
from sandmask.functional.head import NARROW, head, linear_pair
from sandmask.networks.batch_norm import RUNNING, BatchStatistics
from sandmask.networks.featurizer import Featurizer

T = TypeVar("T")


class _Classifier(nn.Linear):
    """A layer of the classifier, with its own type, so that it stays in full precision."""


_HIDDEN = ("classifier_hidden.0", "classifier_hidden.1")  # the hidden layers of a nonlinear classifier


class _Parts(nn.Module):
    """Featurizer and classifier as one module, which has the parameters of both. Calling it returns the features.

    With `paired`, it returns the logits; the last layer of the featurizer and the classifier are then computed as one.
    With `staged`, it also returns the intermediate results of the featurizer.
    """

    def __init__(
        self, featurizer: Callable[[], Featurizer], n_classes: int, extra_features: int, nonlinear: bool
    ) -> None:
        super().__init__()
        self.featurizer = featurizer()
        width = self.featurizer.n_features + extra_features
        if nonlinear and width < 4:
            raise SandmaskError(f"nonlinear_classifier needs at least 4 features. The network has {width}.")
        if nonlinear:
            self.classifier_hidden = nn.ModuleList(
                [_Classifier(width, width // 2), _Classifier(width // 2, width // 4)]
            )
            width = width // 4
        self.classifier = _Classifier(width, n_classes)

    def forward(self, x: Tensor, drop: Dropout | None, paired: bool = False, staged: bool = False) -> Any:
        if staged:
            return self.featurizer.stages(x, drop)
        last, classifier = self.featurizer.last, self.classifier
        if paired and last is not None:
            hidden = self.featurizer.hidden(x, drop)
            return linear_pair(hidden, last.weight, last.bias, classifier.weight, classifier.bias)
        features: Tensor = self.featurizer(x, drop)
        return features

    @property
    def memory_format(self) -> torch.memory_format:
        """The format of the featurizer. It is a property, because `torch.save` cannot write it."""
        return self.featurizer.memory_format

    @property
    def pairs(self) -> bool:
        """Whether the last layer of the featurizer and the classifier can be computed as one, and this is faster."""
        last, classifier = self.featurizer.last, self.classifier
        if last is None or hasattr(self, "classifier_hidden") or last.out_features != classifier.in_features:
            return False
        return classifier.in_features >= NARROW * classifier.out_features


class Network(FlatModule):
    """The model that algorithms train. Its parameters are passed to each call: `params = network.unflatten(vector)`.

    :param featurizer: builds the featurizer.
    :param n_classes: number of classes.
    :param extra_features: number of further inputs of the classifier, for methods that append to the features.
    :param dtype: compute precision of the featurizer. The vector, the features and the logits are always float32.
    :param nonlinear: give the classifier two hidden layers, with 1/2 and 1/4 as many units as it has inputs.
    """

    def __init__(
        self,
        featurizer: Callable[[], Featurizer],
        n_classes: int,
        extra_features: int = 0,
        dtype: torch.dtype = torch.float32,
        *,
        nonlinear: bool = False,
    ) -> None:
        build = partial(_Parts, featurizer, n_classes, extra_features, nonlinear)
        super().__init__(build, dtype, exact=(*BATCH_NORM, _Classifier))
        parts = self.skeleton
        assert isinstance(parts, _Parts)
        self.n_features = parts.featurizer.n_features
        self.n_classes = n_classes
        self.nonlinear = nonlinear
        # The layers whose running statistics are parameters: batch-norm that is not frozen.
        self.norms = [s.name.removesuffix(f".{RUNNING[0]}") for s in self.slots if s.name.endswith(RUNNING[0])]
        self.has_kernels = parts.featurizer.has_kernels  # whether K runs can train as one by GPU kernels
        self.why_not_stacked = parts.featurizer.why_not_stacked
        self.embeds = parts.featurizer.embeds
        self._stacks = parts.featurizer.stacks
        self._pairs = parts.pairs
        self._compiled: Compiled | None = None

    def compile(self) -> None:
        """Compile the training passes of the featurizer. The first steps are slow, later ones use fewer kernels.

        If the compiler fails, a warning is logged and the network runs uncompiled.
        """
        self._compiled = Compiled(self.__call__)

    @property
    def compiled(self) -> bool:
        """Whether training passes are compiled."""
        return self._compiled is not None

    @property
    def stacks(self) -> bool:
        """Whether K runs can train as one, under `torch.func.vmap`."""
        return self._stacks and super().stacks

    def unflatten(self, vector: Tensor) -> Params:
        """Return the parameters by name, as `FlatModule.unflatten` does. Running statistics have no gradient."""
        params = super().unflatten(vector)
        if not self.norms:
            return params
        return {name: v.detach() if name.rpartition(".")[2] in RUNNING else v for name, v in params.items()}

    def training(self) -> AbstractContextManager[object]:
        """Return a context in which batch-norm that is not frozen normalizes with the statistics of the minibatch."""
        return BatchStatistics() if self.norms else nullcontext()

    @torch.no_grad()
    def tracked(self, before: Tensor, after: Tensor, x: Tensor) -> Tensor:
        """Return the vector `after` a step, with the running statistics of `before` updated by those of inputs `x`."""
        params = self.unflatten(before)
        with BatchStatistics(keep=True) as statistics:
            self(params, self._cast(x), None)
        moved = self.named(after)
        for layer in self.norms:
            names = [f"{layer}.{running}" for running in RUNNING]
            found = statistics.seen[id(params[names[0]])]
            for name, value in zip(names, found[:2], strict=True):
                moved[name] = params[name] + found.momentum * (value - params[name])
        return self.flatten(moved)

    def features(self, params: Params, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """Return features [N, n_features] of inputs [N, ...]."""
        return self._on_rows(self._features, params, x, drop)

    def _features(self, params: Params, x: Tensor, drop: Dropout | None) -> Tensor:
        features = self._forward(params, x, drop)[..., : self.n_features]
        return features if self.dtype == torch.float32 else features.to(params["classifier.weight"].dtype)

    def stages(self, params: Params, x: Tensor, drop: Dropout | None = None) -> tuple[Tensor, list[Tensor]]:
        """Return the features, and the intermediate results of the featurizer, [N, channels, ...] each."""
        return self._on_rows(self._stages, params, x, drop)

    def _stages(self, params: Params, x: Tensor, drop: Dropout | None) -> tuple[Tensor, list[Tensor]]:
        features, stages = self.call(params, self._cast(x), drop, staged=True)
        exact = params["classifier.weight"].dtype
        return features[..., : self.n_features].to(exact), [stage.to(exact) for stage in stages]

    def _on_rows(self, function: Callable[..., T], params: Params, x: Tensor, drop: Dropout | None) -> T:
        """Call a function of inputs, whose rows several processes may divide among them."""

        def of_rows(x: Tensor, keys: Tensor | None) -> T:
            return function(params, x, None if drop is None or keys is None else Dropout(drop.rate, keys))

        result: T = divided(of_rows, x, None if drop is None else drop.keys)
        return result

    def _forward(self, params: Params, x: Tensor, drop: Dropout | None) -> Tensor:
        compiled = self._compiled if torch.is_grad_enabled() and not is_traced() else None
        forward = compiled or self.__call__
        features: Tensor = forward(params, self._cast(x), drop)
        return features

    def classify(self, params: Params, features: Tensor) -> Tensor:
        """Return logits [..., n_classes] of features [..., n_features]. Rows are flattened to one row per example."""
        rows = features.flatten(0, -2)
        if self.nonlinear:
            for layer in _HIDDEN:
                rows = F.linear(rows, params[f"{layer}.weight"], params[f"{layer}.bias"]).relu()
        logits = F.linear(rows, params["classifier.weight"], params["classifier.bias"])
        return logits.view(*features.shape[:-1], -1)

    def logits(self, params: Params, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """Return logits [N, n_classes] of inputs [N, ...]."""
        return self._on_rows(self._logits, params, x, drop)

    def _logits(self, params: Params, x: Tensor, drop: Dropout | None) -> Tensor:
        if self._pairs and self._compiled is None:
            return self(params, self._cast(x), drop, True)
        if self.nonlinear:
            return self.classify(params, self._features(params, x, drop))
        return head(self._forward(params, x, drop), params["classifier.weight"], params["classifier.bias"])
