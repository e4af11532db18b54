"""Batch-norm that is not frozen: as in a plain training loop; by environment for masks; refused where it is wrong."""

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms import cross_entropy
from sandmask.datasets import DATASETS, Dataset, load_dataset
from sandmask.errors import SandmaskError
from sandmask.functional import EnvBatch
from sandmask.networks import build_featurizer
from sandmask.records import RunSpec
from sandmask.training import RunFolder, Stack, load_run, make_spec

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("Debug28")


def spec_of(algorithm: str) -> RunSpec:
    values = {"freeze_bn": 0, "batch_size": 4, "lr": 1e-3}
    how = {"network": "test_resnet.r160_in1k", "weights": "none"}
    return make_spec(DATASETS["Debug28"], algorithm, [2], steps=3, checkpoint_every=2, hparams=values, **how)  # type: ignore[arg-type]


def test_erm_is_that_of_a_plain_loop(dataset: Dataset, tmp_path: Path) -> None:
    spec = spec_of("ERM")
    stack = Stack([spec], dataset, CPU, weights="none")
    state, network = stack.init(), stack.algorithm.network
    named = network.named(state["params"][0])
    plain = timm.create_model("test_resnet", num_classes=0, in_chans=1)
    inside = {name.removeprefix("featurizer.model."): value.clone() for name, value in named.items()}
    plain.load_state_dict(inside, strict=False)
    head = nn.Linear(network.n_features, 4)
    head.load_state_dict({name: inside[f"classifier.{name}"] for name in ("weight", "bias")})
    plain.train()
    adam = torch.optim.Adam([*plain.parameters(), *head.parameters()], lr=1e-3)
    for batch in stack.feed(0):
        state, _ = stack.step(state, batch)
        loss = F.cross_entropy(head(plain(batch.x[0].flatten(0, 1))), batch.y[0].flatten())
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
    found = network.named(state["params"][0])
    for name, value in plain.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(found[f"featurizer.model.{name}"], value, rtol=1e-4, atol=1e-5)
    x = dataset.inputs(torch.arange(6))
    with torch.no_grad():
        expected = head(plain.eval()(x))
    torch.testing.assert_close(
        stack.algorithm.predict({"params": state["params"][0]}, x), expected, rtol=1e-3, atol=1e-4
    )

    RunFolder(tmp_path).train(spec, dataset, CPU, weights="none")
    run = load_run(tmp_path)
    torch.testing.assert_close(run.logits(x).detach(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(run.module()(x), run.logits(x))


def test_a_masks_environments_do_not_see_each_other(dataset: Dataset) -> None:
    stack = Stack([spec_of("SANDMask")], dataset, CPU, weights="none")
    algorithm, state, batches = stack.algorithm, stack.init(), stack.feed(0)
    batch = EnvBatch(*(field[0] for field in next(batches)))

    def gradients(batch: EnvBatch) -> Tensor:
        def risks(vector: Tensor, batch: EnvBatch) -> Tensor:
            logits = algorithm.logits(algorithm.network.unflatten(vector), batch, {})
            return batch.mean(cross_entropy(logits, batch.y))

        vectors = state["params"].expand(batch.n_envs, -1)
        with algorithm.network.training():
            return algorithm.problem.differentiate.environment_gradients(risks, vectors, batch)[0]

    here, there = gradients(batch), gradients(batch._replace(x=torch.stack([batch.x[0], 1.0 - batch.x[1]])))
    assert torch.equal(here[0], there[0])
    assert not torch.equal(here[1], there[1])
    after, _ = stack.step(state, next(batches))
    norms = [slot.name for slot in algorithm.network.slots if "running" in slot.name]
    before, moved = (algorithm.network.named(each["params"][0]) for each in (state, after))
    assert not any(torch.equal(before[name], moved[name]) for name in norms)


def test_where_it_is_wrong_it_is_refused(dataset: Dataset) -> None:
    for network in ("mlp", "mnist-convnet"):
        with pytest.raises(SandmaskError, match="freeze_bn=0 is for timm networks with batch-norm"):
            build_featurizer(network, (3, 28, 28), {"mlp_width": 8, "mlp_depth": 3, "freeze_bn": 0})
    with pytest.raises(SandmaskError, match=r"'test_vit.*' has none"):
        build_featurizer("test_vit.r160_in1k", (3, 32, 32), {"freeze_bn": 0}, "none")()
    with pytest.raises(SandmaskError, match="MIRO compares with the pretrained network"):
        Stack([spec_of("MIRO")], dataset, CPU, weights="none")
    with pytest.raises(SandmaskError, match="--compile does not support freeze_bn=0"):
        Stack([spec_of("ERM")], dataset, CPU, weights="none", compiled=True)
