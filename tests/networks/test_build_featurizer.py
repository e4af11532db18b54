"""From names to featurizers; timm's own weights without a network; what is listed."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from sandmask import networks
from sandmask.errors import SandmaskError
from sandmask.networks import (
    MLP,
    Backbone,
    MNISTConvNet,
    Network,
    build_featurizer,
    normalization,
)

SIZES = {"mlp_width": 16, "mlp_depth": 4}
SHAPE = (3, 32, 32)


def test_public_names_resolve() -> None:
    assert all(hasattr(networks, name) for name in networks.__all__)


@pytest.mark.parametrize(
    ("network", "shape", "kind", "n_features"),
    [
        ("mlp", (18,), MLP, 16),
        ("MLP", (2, 5, 5), MLP, 16),
        ("mnist-convnet", (2, 28, 28), MNISTConvNet, 128),
        ("test_resnet.r160_in1k", SHAPE, Backbone, 96),
        ("Test_ViT", SHAPE, Backbone, 64),
    ],
)
@pytest.mark.parametrize("extra", [0, 1])
def test_featurizers(network: str, shape: tuple[int, ...], kind: type, n_features: int, extra: int) -> None:
    build = build_featurizer(network, shape, SIZES, "none")
    built = build(extra_channels=extra) if extra else build()
    assert isinstance(built, kind)
    assert built.n_features == n_features
    x = torch.zeros(2, shape[0] + extra, *shape[1:])
    assert built(x).shape == (2, n_features)


def test_random_weights_follow_the_seed() -> None:
    network = Network(build_featurizer("test_resnet", SHAPE, {}, "none"), 3)
    assert torch.equal(network.init(1), network.init(1))
    assert not torch.equal(network.init(1), network.init(2))


def test_from_a_file_only_the_classifier_follows_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), path)
    network = Network(build_featurizer("test_resnet", SHAPE, {}, path), 3)
    one, two = network.named(network.init(1)), network.named(network.init(2))
    differing = {name for name in one if not torch.equal(one[name], two[name])}
    assert differing == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(
    ("network", "shape", "sizes", "weights", "message"),
    [
        ("mlp", (18,), {"mlp_width": 3}, None, "mlp_depth"),
        ("mlp", (18,), SIZES, "some.pth", "takes no file"),
        ("mnist-convnet", (18,), {}, None, "takes images"),
        ("test_resnet", (18,), {}, "none", "takes images"),
        ("efficientnet_litte0", SHAPE, {}, "none", "Did you mean 'efficientnet_lite0'"),
        ("resnet50.tv_in2k", SHAPE, {}, "none", "Did you mean 'resnet50.tv_in1k'"),
    ],
)
def test_mistakes(
    network: str, shape: tuple[int, ...], sizes: dict[str, int], weights: str | None, message: str
) -> None:
    with pytest.raises(SandmaskError, match=message):
        build_featurizer(network, shape, sizes, weights)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty cache, and the address of a hub that nobody listens at: no name to look up, no proxy to answer."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"https://127.0.0.1:{taken.getsockname()[1]}"
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield address


@pytest.mark.parametrize("weights", ["pretrained", None])
def test_without_network_no_download_is_tried_and_the_error_names_both_remedies(
    weights: str | None, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a download takes most of a minute to give up")

    monkeypatch.setattr("sandmask.networks._timm.create", slow)
    with pytest.raises(SandmaskError) as caught:
        build_featurizer("resnet50.tv_in1k", (3, 224, 224), {}, weights)
    for part in ("resnet50.tv_in1k", "--weights FILE", "--weights none", hub):
        assert part in str(caught.value)
    monkeypatch.setattr("sandmask.networks._timm.answers", lambda address: address == hub)
    with pytest.raises(AssertionError, match="a download"):
        build_featurizer("resnet50.tv_in1k", (3, 224, 224), {}, weights)


@pytest.mark.usefixtures("hub")
def test_offline_mode_asks_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("asked a server in offline mode")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("urllib.request.urlopen", forbidden)
    with pytest.raises(SandmaskError, match="not on this machine"):
        build_featurizer("resnet18", SHAPE, {})


def has_weights(name: str) -> bool:
    cfg = timm.get_pretrained_cfg(name)
    return cfg is not None and bool(cfg.has_weights)


def test_a_network_without_pretrained_weights() -> None:
    without = next(name for name in timm.list_models("resnet*") if not has_weights(name))
    with pytest.raises(SandmaskError, match="no pretrained weights"):
        build_featurizer(without, (3, 224, 224), {}, "pretrained")


@pytest.mark.usefixtures("hub")
def test_pretrained_weights_from_the_cache(tmp_path: Path) -> None:
    """What timm downloaded before is used without a network."""
    state = timm.create_model("test_resnet").state_dict()
    repository = tmp_path / "models--timm--test_resnet.r160_in1k"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    save_file(state, snapshot / "model.safetensors")
    build = build_featurizer("test_resnet.r160_in1k", SHAPE, {}, "pretrained")
    built = build()
    assert isinstance(built, Backbone)
    assert all(torch.equal(value, state[name]) for name, value in built.model.state_dict().items())
    assert build(extra_channels=1)(torch.zeros(1, 4, 32, 32)).shape == (1, 96)


def test_normalization() -> None:
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert normalization("resnet50.tv_in1k") == imagenet
    assert normalization("mnist-convnet") == imagenet
    assert normalization("tf_efficientnet_lite0") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    with pytest.raises(SandmaskError, match="Unknown network"):
        normalization("resnot")
