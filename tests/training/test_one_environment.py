"""One training environment is enough for methods that do not compare environments."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sandmask.algorithms import ALGORITHMS
from sandmask.datasets import Dataset, TensorDataset
from sandmask.errors import SandmaskError
from sandmask.records import RunSpec
from sandmask.training import RunFolder, Stack, load_run, train_stack

Specs = Callable[..., RunSpec]
ALONE = [name for name in ALGORITHMS if not ALGORITHMS[name].compares_environments and name != "MIRO"]  # for images


def test_erm_is_among_them() -> None:
    assert {"ERM", "SAM", "RSC"} <= set(ALONE)
    assert not {"IRM", "GroupDRO", "ANDMask", "SANDMask", "CORAL", "VREx", "Fish"} & set(ALONE)


@pytest.mark.parametrize("algorithm", [*ALONE, "SAM+SD"])
def test_it_trains_alone_and_stacked(
    algorithm: str, spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    specs = [spec_of(algorithm, held_out, steps=4, seed=seed) for seed, held_out in enumerate([(0, 1), (1, 2)])]
    stacked = train_stack(specs, dataset, device, tmp_path / "stack", diagnostics=True)
    for spec, run in zip(specs, stacked, strict=True):
        (alone,) = train_stack([spec], dataset, device, tmp_path / spec.id, diagnostics=True)
        assert run.status == "done"
        np.testing.assert_allclose(run.metrics["loss"], alone.metrics["loss"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(run.accuracy_in, alone.accuracy_in, rtol=0, atol=0.05)


def test_erm_on_one_environment_is_a_plain_loop(
    spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    spec = spec_of("ERM", (0, 1), steps=6, hparams={"dropout": 0.0, "weight_decay": 1e-3})
    RunFolder(tmp_path).train(spec, dataset, device)
    stack = Stack([spec], dataset, device)
    network = stack.algorithm.network
    vector = stack.init()["params"][0].clone().requires_grad_()
    adam = torch.optim.Adam([vector], lr=spec.hparams["lr"], weight_decay=1e-3)
    for batch, _ in zip(stack.feed(0), range(6), strict=False):
        x, y = batch.x[0].flatten(0, 1), batch.y[0].flatten()
        loss = F.cross_entropy(network.logits(network.unflatten(vector), x), y)
        (vector.grad,) = torch.autograd.grad(loss, [vector])
        adam.step()
    trained = load_run(tmp_path)
    inputs = dataset.inputs(torch.arange(20))
    expected = network.logits(network.unflatten(vector.detach()), inputs)
    torch.testing.assert_close(trained.logits(inputs), expected, rtol=1e-4, atol=1e-5)


def test_others_say_that_they_need_two(spec_of: Specs, dataset: Dataset, device: torch.device) -> None:
    with pytest.raises(SandmaskError, match="ANDMask needs at least 2 environments to train on"):
        Stack([spec_of("ANDMask", (0, 1))], dataset, device)
    with pytest.raises(SandmaskError, match=r"ANDMask\+SD needs at least 2"):
        Stack([spec_of("ANDMask+SD", (0, 1))], dataset, device)
    with pytest.raises(SandmaskError, match=r"ERM needs at least 1 environment to train on.*Hold out fewer\."):
        Stack([spec_of("ERM", (0, 1, 2))], dataset, device)


def test_a_dataset_with_too_few_environments_is_said_to_be_too_small(spec_of: Specs, device: torch.device) -> None:
    pair = TensorDataset("Two", ("a", "b"), ("0", "1"), [(torch.randn(20, 8), torch.arange(20) % 2)] * 2)
    with pytest.raises(SandmaskError, match=r"Two has 2, 1 of them held out\. Use a dataset with at least 3\."):
        Stack([spec_of("ANDMask", (0,))], pair, device)
