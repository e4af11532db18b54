"""Networks and algorithms can be pickled: copies start from the same weights and predict the same."""

import math
import pickle
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils import _pytree as pytree

from sandmask.algorithms import ALGORITHMS, Problem
from sandmask.networks import NETWORKS, Network, NetworkEntry, build_featurizer

SIZES = {"mlp_width": 8, "mlp_depth": 3}


@pytest.mark.parametrize("name", [*(entry.name for entry in ALGORITHMS.values()), "SAM+SANDMask+Mixup"])
def test_algorithms(name: str) -> None:
    problem = Problem(build_featurizer("mlp", (5,), SIZES), n_envs=3, n_classes=2, input_shape=(5,), sizes=SIZES)
    algorithm = ALGORITHMS[name].build(problem)
    copied = pickle.loads(pickle.dumps(algorithm))
    state, same = algorithm.init(1), copied.init(1)
    assert pytree.tree_all(lambda equal: equal, pytree.tree_map(torch.equal, state, same))
    x = torch.ones(4, 5)
    assert torch.equal(algorithm.predict(state, x), copied.predict(same, x))


def own_network(shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 4))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # of the compiler's own imports
@pytest.mark.parametrize(("network", "compiled"), [("own", False), ("test_resnet", True), ("resnet18", False)])
def test_networks(network: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NETWORKS, "_entries", {"own": NetworkEntry("own", "a module of the user", own_network)})
    weights = None if network == "own" else tmp_path / "weights.safetensors"
    if weights is not None:
        save_file(timm.create_model(network).state_dict(), weights)
    built = Network(build_featurizer(network, (3, 32, 32), {}, weights), 2)
    if compiled:
        built.compile()
    torch.save(built, tmp_path / "network.pt")
    copied = torch.load(tmp_path / "network.pt", weights_only=False)
    assert copied.compiled == compiled
    assert torch.equal(copied.init(1), built.init(1))
