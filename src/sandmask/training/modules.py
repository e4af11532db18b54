"""A trained model as an ordinary PyTorch module."""

from collections import OrderedDict
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sandmask.algorithms import Algorithm, State
from sandmask.training.model_file import constants_of, set_constants


def as_module(algorithm: Algorithm, state: State) -> nn.Module:
    """Featurizer and classifier with the state's weights; the method's own prediction where it has one."""
    if algorithm.is_network:
        module = _plain_module(algorithm)
        values = {**algorithm.network.constants, **algorithm.network.named(state["params"])}
        places = dict(chain(module.named_parameters(), module.named_buffers()))
        if {name: value.shape for name, value in places.items()} == {k: v.shape for k, v in values.items()}:
            with torch.no_grad():
                for name, place in places.items():
                    place.copy_(values[name])
            return module.eval()
    return Predictor(algorithm, state).eval()


def _plain_module(algorithm: Algorithm) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):  # its weights are about to be replaced
        featurizer = algorithm.problem.featurizer()
        classifier = nn.Linear(featurizer.n_features, algorithm.problem.n_classes)
    return nn.Sequential(OrderedDict(featurizer=featurizer, classifier=classifier))


class Predictor(nn.Module):
    """An algorithm's `predict` as a module. The flat vector is its parameter; the rest of the state, buffers."""

    params: nn.Parameter

    def __init__(self, algorithm: Algorithm, state: State) -> None:
        super().__init__()
        self._algorithm = algorithm
        self.params = nn.Parameter(state["params"].clone())
        rest = {name: value for name, value in state.items() if name != "params"}
        leaves, self._structure = pytree.tree_flatten((rest, constants_of(algorithm)))
        for number, leaf in enumerate(leaves):
            self.register_buffer(f"state_{number}", leaf.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch, which is taken to come from one environment."""
        rest, constants = pytree.tree_unflatten(list(self.buffers()), self._structure)
        set_constants(self._algorithm, constants)
        return self._algorithm.predict({**rest, "params": self.params}, x)
