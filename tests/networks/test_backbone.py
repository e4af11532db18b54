"""timm backbones as featurizers: against plain timm modules, under `vmap` and autograd."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from sandmask.errors import SandmaskError
from sandmask.functional import Dropout
from sandmask.functional.random import key_of, keys
from sandmask.networks import Backbone, Featurizer, Network, backbone

FAMILIES = ["test_resnet", "test_efficientnet", "test_vit", "test_vit3", "test_convnext", "test_nfnet"]
STACKING = ["test_resnet", "test_efficientnet", "test_vit", "test_byobnet"]
SHAPE = (3, 32, 32)


def images(n: int = 4, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(2))


LABELS = torch.tensor([0, 2, 1, 2])


def with_statistics(name: str, shape: tuple[int, ...] = SHAPE) -> Backbone:
    """A backbone whose batch-norm has statistics and gains as after training, not zeros and ones."""
    built = Backbone(name, shape)
    generator = torch.Generator().manual_seed(3)
    for part in built.modules():
        if isinstance(part, nn.BatchNorm2d):
            for tensor, low, high in ((part.running_mean, -0.5, 0.5), (part.running_var, 0.5, 1.5)):
                assert tensor is not None
                tensor.uniform_(low, high, generator=generator)
            with torch.no_grad():
                part.weight.uniform_(0.5, 1.5, generator=generator)
                part.bias.uniform_(-0.5, 0.5, generator=generator)
    return built


def network_of(name: str, dtype: torch.dtype = torch.float32) -> Network:
    return Network(lambda: with_statistics(name), 3, dtype=dtype)


def loss_of(network: Network, vector: Tensor, x: Tensor, y: Tensor = LABELS) -> Tensor:
    return F.cross_entropy(network.logits(network.unflatten(vector), x), y)


def gradient_of(network: Network, vector: Tensor, x: Tensor, y: Tensor = LABELS) -> Tensor:
    leaf = vector.clone().requires_grad_()
    return torch.autograd.grad(loss_of(network, leaf, x, y), leaf)[0]


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", FAMILIES)
def test_features_are_those_of_the_plain_timm_model(name: str) -> None:
    network = Network(lambda: Backbone(name, SHAPE), 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        options: dict[str, Any] = {"img_size": SHAPE[1:]} if "vit" in name else {}
        plain = timm.create_model(name, num_classes=0, **options).eval()
    out = network.features(network.unflatten(network.init(11)), images())
    assert out.shape == (4, network.n_features)
    torch.testing.assert_close(out, plain(images()), rtol=1e-5, atol=1e-5)


def test_features_of_models_with_a_wider_head() -> None:
    built = Backbone("mobilenetv3_small_050", (3, 64, 64))
    assert built.n_features == built(images(1, (3, 64, 64))).shape[1]


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_batch_norm_is_frozen(name: str) -> None:
    built = with_statistics(name)
    before = {n: b.clone() for n, b in built.named_buffers()}
    x = images()
    outer = nn.Sequential(built).train()
    together, alone = outer(x), torch.cat([outer(row[None]) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)  # examples do not see each other
    assert all(torch.equal(b, before[n]) for n, b in built.named_buffers())
    assert not any(part.training for part in built.model.modules())


def test_scale_and_shift_of_batch_norm_train() -> None:
    network = network_of("test_resnet")
    gradient = network.named(gradient_of(network, network.init(0), images()))
    norms = [name for name in gradient if ".bn1." in name]
    assert norms
    assert all(gradient[name].abs().sum() > 0 for name in norms)


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_input_channels(name: str, channels: int) -> None:
    """Weights of three channels are adapted as timm adapts its own."""
    options: dict[str, Any] = {"img_size": SHAPE[1:]} if "vit" in name else {}
    weights = timm.create_model(name, num_classes=7, **options).state_dict()
    built = Backbone(name, (channels, *SHAPE[1:]), weights)
    x = images(2, (channels, *SHAPE[1:]))
    overlay = {"state_dict": dict(weights)}
    expected = timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=0, in_chans=channels, **options
    ).eval()
    torch.testing.assert_close(built(x), expected(x), rtol=1e-5, atol=1e-5)


def test_position_embeddings_follow_the_image_size() -> None:
    weights = timm.create_model("test_vit", img_size=64).state_dict()
    built = Backbone("test_vit", SHAPE, weights)
    overlay = {"state_dict": dict(weights)}
    expected = timm.create_model(
        "test_vit", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=0, img_size=32
    )
    torch.testing.assert_close(built.model.get_parameter("pos_embed"), expected.pos_embed)
    torch.testing.assert_close(built(images()), expected.eval()(images()), rtol=1e-5, atol=1e-5)


def test_dropout_is_before_the_classifier() -> None:
    built = Backbone("test_resnet", SHAPE)
    rate = torch.tensor(0.5)
    drop = Dropout(rate, keys(key_of(4), 4))
    plain, dropped = built(images()), built(images(), drop)
    torch.testing.assert_close(dropped, drop(plain, 0))
    assert 0.3 < (dropped[plain != 0] == 0).float().mean() < 0.7


def test_running_statistics_have_no_gradient() -> None:
    network = Network(lambda: Backbone("test_resnet", SHAPE, freeze_bn=False), 3)
    gradients = network.named(gradient_of(network, network.init(0), images()))  # as in evaluations, which use them
    assert gradients["featurizer.model.bn1.weight"].any()
    assert not gradients["featurizer.model.bn1.running_mean"].any()


class Padded(Featurizer):
    """Three features, and a column of zeros."""

    n_features = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor, drop: Dropout | None = None) -> Tensor:
        return F.pad(self.layer(x), (0, 1))


def test_columns_beyond_the_features_are_cut_off() -> None:
    network = Network(Padded, 2)
    params, x = network.unflatten(network.init(0)), torch.randn(4, 5)
    assert network.features(params, x).shape == network.stages(params, x)[0].shape == (4, 3)
    torch.testing.assert_close(network.logits(params, x), network.classify(params, network.features(params, x)))


@pytest.mark.parametrize("name", STACKING)
def test_small_models_stack(name: str) -> None:
    """`vmap` over parameters, and over environments, gives the gradients of plain autograd."""
    network, x = network_of(name), images()
    assert network.stacks
    vectors = torch.stack([network.init(0), network.init(1)])
    expected = [gradient_of(network, vector, x) for vector in vectors]
    over_runs = vmap(grad(lambda v: loss_of(network, v, x)))(vectors)
    for got, want in zip(over_runs, expected, strict=True):
        assert error(got, want) < 1e-4
    by_env = (x.view(2, 2, *SHAPE), LABELS.view(2, 2))
    over_envs = vmap(grad(lambda v, x, y: loss_of(network, v, x, y)), in_dims=(None, 0, 0))(vectors[0], *by_env)
    assert error(over_envs.mean(0), expected[0]) < 1e-4


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_second_derivatives(name: str) -> None:
    network, x = network_of(name), images()
    leaf = network.init(0).requires_grad_()
    (first,) = torch.autograd.grad(loss_of(network, leaf, x), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    assert second.isfinite().all()
    assert second.norm() > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_large_models_are_channels_last_and_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = network_of(name)
    monkeypatch.setattr(backbone, "LARGE", 1)
    large = network_of(name)
    assert small.stacks
    assert not large.stacks
    vector, x = small.init(0), images()
    assert not torch.equal(large.init(0), vector)  # another order of the same values
    expected = small.named(gradient_of(small, vector, x))
    gradient = large.named(gradient_of(large, large.flatten(small.named(vector)), x))
    everything = large.flatten(expected)
    assert error(large.flatten(gradient), everything) < 1e-4


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "test_vit"])
def test_bfloat16_stays_close_and_returns_float32(name: str) -> None:
    exact, low = network_of(name), network_of(name, torch.bfloat16)
    vector, x = exact.init(0), images()
    logits = low.logits(low.unflatten(vector), x)
    assert logits.dtype == low.features(low.unflatten(vector), x).dtype == torch.float32
    reference = exact.logits(exact.unflatten(vector), x)
    assert 0 < error(logits, reference) < 0.05
    gradient = gradient_of(low, vector, x)
    assert gradient.dtype == torch.float32
    assert 0 < error(gradient, gradient_of(exact, vector, x)) < 0.15


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("test_vit", (3, 30, 30), "does not take inputs of 3 x 30 x 30"),
        ("test_resnet", (18,), "takes images"),
        ("resnet5", (3, 32, 32), "Did you mean 'resnet50'"),
        ("resnet50.tv_in2k", (3, 32, 32), "resnet50.tv_in1k"),
    ],
)
def test_mistakes(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(SandmaskError, match=message):
        Backbone(name, shape)
