"""Options that every run has, whatever its algorithm: what is trained on, and with which network."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from sandmask.algorithms import ALGORITHMS
from sandmask.datasets import Dataset, ImageDataset, TensorDataset, load_dataset
from sandmask.errors import SandmaskError
from sandmask.functional import random
from sandmask.networks import Network, build_featurizer
from sandmask.records import RunSpec
from sandmask.training import Stack
from sandmask.training.sampling import Sampler, split_environment
from sandmask.training.specs import stack_key

Specs = Callable[..., RunSpec]
CPU = torch.device("cpu")


def unbalanced() -> TensorDataset:
    """Environments with 90, 10 and 0 examples of the classes, in other orders."""
    counts = ([90, 10, 0], [10, 0, 90], [30, 40, 30])
    parts = [(torch.zeros(100, 2), torch.repeat_interleave(torch.arange(3), torch.tensor(each))) for each in counts]
    return TensorDataset("DebugVector", ("a", "b", "c"), ("0", "1", "2"), parts)


def test_balanced_minibatches_have_domainbeds_weights(spec_of: Specs) -> None:
    dataset = unbalanced()
    specs = [spec_of(test_envs=(env,), trial_seed=env, hparams={"class_balanced": 1}) for env in (2, 0)]
    numbers = Sampler(dataset, specs, 4000, CPU)(random.keys(random.key_of(1), 2))
    for run, (spec, envs) in enumerate(zip(specs, ((0, 1), (1, 2)), strict=True)):
        for place, env in enumerate(envs):
            pool = split_environment(dataset, env, spec.trial_seed)[0]
            labels = dataset.labels[pool]
            present = torch.tensor(sorted(set(labels.tolist())))
            weights = torch.stack([1 / ((labels == y).sum() * len(present)) for y in labels])  # as DomainBed's
            drawn = torch.bincount(numbers[run, place], minlength=300)[pool] / 4000
            assert drawn.sum().item() == pytest.approx(1)  # from the pool, and from nowhere else
            for y in present:
                assert drawn[labels == y].sum().item() == pytest.approx(weights[labels == y].sum().item(), abs=0.04)
    alone = Sampler(dataset, specs[1:], 50, CPU)(random.keys(random.key_of(1), 2)[1:])
    assert torch.equal(alone[0], numbers[1, :, :50])


def test_the_holdout_fraction_is_what_is_held_back(dataset: Dataset, spec_of: Specs) -> None:
    spec = spec_of(hparams={"holdout_fraction": 0.5})
    stack = Stack([spec], dataset, CPU)
    for env in range(3):
        inside, outside = split_environment(dataset, env, 0, 0.5)
        assert len(outside) == (dataset.bounds[env + 1] - dataset.bounds[env]) // 2
        assert [sizes[env] for sizes in stack.evaluator.sizes(0)] == [len(inside), len(outside)]
    trained_on = set(stack.sampler.indices.flatten().tolist())
    assert not trained_on & set(split_environment(dataset, 1, 0, 0.5)[1].tolist())
    assert stack_key(spec) != stack_key(spec_of(hparams={"holdout_fraction": 0.3}))
    with pytest.raises(SandmaskError, match="at least 1000 examples"):
        Stack([spec_of(hparams={"holdout_fraction": 0.001})], dataset, CPU)


def test_full_data_trains_on_what_is_held_back_too(dataset: Dataset, spec_of: Specs) -> None:
    sampler = Sampler(dataset, [spec_of(hparams={"full_data": 1})], 8, CPU)
    for place, env in enumerate((1, 2)):
        size = int(sampler.sizes[0, place])
        assert set(sampler.indices[0, place, :size].tolist()) == set(range(*dataset.bounds[env : env + 2]))


def test_unaugmented_training_images_are_those_of_evaluations(tmp_path: Path) -> None:
    draws = np.random.RandomState(0)
    for domain in ("art", "photo", "sketch"):
        for name in ("cat", "dog"):
            (tmp_path / domain / name).mkdir(parents=True)
            for number in range(5):
                pixels = draws.randint(0, 256, (5, 5, 3)).astype(np.uint8)
                Image.fromarray(pixels).resize((40, 40)).save(tmp_path / domain / name / f"{number}.png")
    dataset = load_dataset(str(tmp_path), image_size=32)
    assert isinstance(dataset, ImageDataset)
    indices, key = torch.tensor([0, 7, 3]), random.key_of(0)
    plain = dataset.unaugmented()
    assert torch.equal(plain.training_inputs(indices, key), dataset.inputs(indices))
    assert torch.equal(next(iter(plain.training_batches([(indices, key)]))), dataset.inputs(indices))
    assert not torch.equal(dataset.training_inputs(indices, key), dataset.inputs(indices))


def test_a_nonlinear_classifier_is_a_small_mlp() -> None:
    build = build_featurizer("mlp", (5,), {"mlp_width": 16, "mlp_depth": 3})
    network = Network(build, 3, nonlinear=True)
    params = network.unflatten(network.init(0))
    x = torch.randn(4, 5)
    layers = [nn.Linear(16, 8), nn.Linear(8, 4), nn.Linear(4, 3)]
    for layer, name in zip(layers, ("classifier_hidden.0", "classifier_hidden.1", "classifier"), strict=True):
        layer.load_state_dict({part: params[f"{name}.{part}"] for part in ("weight", "bias")})
    naive = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])(network.features(params, x))
    torch.testing.assert_close(network.logits(params, x), naive)
    assert network.n_features == 16


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_trains_a_nonlinear_classifier_or_says_why_not(
    algorithm: str, dataset: Dataset, spec_of: Specs
) -> None:
    specs = [spec_of(algorithm, seed=k, steps=2, hparams={"nonlinear_classifier": 1}) for k in range(2)]
    if ALGORITHMS[algorithm].build.linear_only:  # type: ignore[attr-defined]
        with pytest.raises(SandmaskError, match="linear classifier"):
            Stack(specs, dataset, CPU)
        return
    stack = Stack(specs, dataset, CPU)
    state = stack.init()
    for batch in stack.feed(0):
        state, metrics = stack.step(state, batch)
    assert metrics["loss"].isfinite().all()
    assert stack.accuracies(state).inside.shape == (2, 3)


VIT = "test_vit.r160_in1k"


def test_the_last_blocks_of_a_transformer_are_its_class_tokens() -> None:
    featurizer = build_featurizer(VIT, (3, 32, 32), {"last_blocks": 2}, "none")()
    model = featurizer.model
    assert isinstance(model, nn.Module)
    tokens: list[torch.Tensor] = []
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.Sequential)
    for block in list(blocks)[-2:]:
        block.register_forward_hook(lambda _, __, out: tokens.append(out))
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        model(x)
        before, last = (model.get_submodule("norm")(each) for each in tokens)
        features = featurizer(x)
    prefix = int(model.num_prefix_tokens)  # type: ignore[arg-type]
    expected = torch.cat([before[:, 0], last[:, 0], last[:, prefix:].mean(1)], dim=1)
    torch.testing.assert_close(features, expected)
    assert featurizer.n_features == expected.shape[1]


def test_attention_only_leaves_everything_else_constant() -> None:
    network = Network(build_featurizer(VIT, (3, 32, 32), {"attention_only": 1}, "none"), 3)
    trained = {slot.name for slot in network.slots}
    assert {"classifier.weight", "classifier.bias"} < trained
    assert all(".attn." in name for name in trained if not name.startswith("classifier"))
    assert any(".mlp." in name for name in network.constants)


@pytest.mark.parametrize("option", ["last_blocks", "attention_only"])
@pytest.mark.parametrize("network", ["mlp", "test_resnet.r160_in1k"])
def test_options_of_transformers_are_refused_elsewhere(option: str, network: str) -> None:
    shape = (5,) if network == "mlp" else (3, 32, 32)
    with pytest.raises(SandmaskError, match=f"{option} is for vision transformers"):
        build_featurizer(network, shape, {"mlp_width": 8, "mlp_depth": 3, option: 1}, "none")()
