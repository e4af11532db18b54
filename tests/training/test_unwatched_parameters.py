"""Networks that use a parameter in a way that no layer of the fast steps knows: runs train as they would by `step`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sandmask.algorithms import ALGORITHMS, Problem
from sandmask.functional import Direct, Functional, make_batch, random
from sandmask.networks import Featurizer
from sandmask.training.stack_step import looped_step, stacked_step

N_ENVS, WIDTH = 3, 5


class Transposing(Featurizer):
    """Multiplies by `weight.T` instead of calling a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(4, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.n_features = WIDTH

    def forward(self, x: Tensor, drop: Any = None) -> Tensor:
        return torch.relu(self.layer(x)) @ self.weight.T


@pytest.mark.parametrize("steps", [stacked_step, looped_step])
@pytest.mark.parametrize("n_runs", [1, 2])
def test_a_transposed_parameter_trains(steps: Any, n_runs: int) -> None:
    differentiate = Functional() if n_runs > 1 else Direct()
    problem = Problem(Transposing, N_ENVS, 2, (4,), dropout=False, differentiate=differentiate)
    algorithm = ALGORITHMS["ANDMask"].build(problem)
    torch.manual_seed(0)
    keys = torch.stack([random.key_of(run) for run in range(n_runs)])
    batches = [make_batch(torch.randn(N_ENVS, 6, 4), torch.randint(0, 2, (N_ENVS, 6)), key) for key in keys]
    hparams = {name: torch.full((n_runs,), value) for name, value in (("lr", 0.1), ("weight_decay", 0.0), ("tau", 0.0))}
    states = [algorithm.init(run) for run in range(n_runs)]
    args = [pytree.tree_map(lambda *leaves: torch.stack(leaves), *each) for each in (states, batches)]
    found, _ = steps(algorithm)(*args, hparams, keys)
    for run in range(n_runs):
        one = pytree.tree_map(lambda t: t[run], (*args, hparams, keys))  # noqa: B023
        expected, _ = algorithm.step(*one)
        torch.testing.assert_close(found["params"][run], expected["params"], rtol=1e-4, atol=1e-5)
