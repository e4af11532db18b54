"""Weights from files: what is read, what is tolerated, and what the errors say."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sandmask.errors import SandmaskError
from sandmask.networks import Backbone, build_featurizer, load_weights

SHAPE = (3, 32, 32)


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    """A whole model's, its classifier included."""
    return dict(timm.create_model("test_resnet", num_classes=5).state_dict())


def assert_same_body(built: nn.Module, state: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert isinstance(built, Backbone)
    body = built.model.state_dict()
    assert set(state) - set(body) == {"fc.weight", "fc.bias"}
    for name, value in body.items():
        torch.testing.assert_close(value, state[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_formats(suffix: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    assert_same_body(build_featurizer("test_resnet", SHAPE, {}, path)(), state)


WRAPPINGS: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "data parallel": lambda s: {f"module.{k}": v for k, v in s.items()},
    "lightning": lambda s: {"state_dict": {f"model.{k}": v for k, v in s.items()}, "epoch": 3},
    "both": lambda s: {"model": {f"module.model.{k}": v for k, v in s.items()}},
    "no counters": lambda s: {k: v for k, v in s.items() if not k.endswith("num_batches_tracked")},
    "no classifier": lambda s: {k: v for k, v in s.items() if not k.startswith("fc.")},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrappings(wrapping: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(WRAPPINGS[wrapping](state), path)
    assert_same_body(build_featurizer("test_resnet", SHAPE, {}, str(path))(), state)


def test_half_precision_is_widened(state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    save_file({k: v.half() if v.is_floating_point() else v for k, v in state.items()}, path)
    assert {v.dtype for v in load_weights(path).values()} == {torch.float32, torch.int64}
    assert_same_body(build_featurizer("test_resnet", SHAPE, {}, path)(), state, tolerance=1e-3)


def test_the_file_is_read_once(state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    build = build_featurizer("test_resnet", SHAPE, {}, path)
    path.unlink()
    first, second = build(), build()
    assert_same_body(first, state)
    with torch.no_grad():
        next(iter(first.parameters())).zero_()
    assert_same_body(second, state)  # each call has its own
    assert_same_body(build(), state)
    assert build(extra_channels=1)(torch.zeros(2, 4, 32, 32)).shape == (2, second.n_features)


def test_building_from_a_file_draws_no_random_numbers(state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    build_featurizer("test_resnet", SHAPE, {}, path)()
    assert torch.equal(torch.get_rng_state(), before)


def refusal(path: Path, network: str = "test_resnet", shape: tuple[int, ...] = SHAPE) -> str:
    with pytest.raises(SandmaskError) as caught:
        build_featurizer(network, shape, {}, path)
    message = str(caught.value)
    assert str(path) in message
    return message


def test_missing_and_unexpected_tensors_are_named(state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "broken.pth"
    broken: dict[str, Any] = {k: v for k, v in state.items() if not k.startswith("layer1.0.")}
    broken["extra.weight"] = torch.zeros(2)
    broken["bn1.weight"] = torch.zeros(3)
    torch.save(broken, path)
    message = refusal(path)
    missing = sum(k.startswith("layer1.0.") and "num_batches" not in k for k in state)
    assert f"{missing} tensors missing (layer1.0." in message
    assert "1 tensor unexpected (extra.weight)" in message
    assert f"bn1.weight [3] instead of {list(state['bn1.weight'].shape)}" in message
    assert "--weights none" in message


def test_weights_of_another_network_are_recognized(tmp_path: Path) -> None:
    path = tmp_path / "downloaded.pth"
    torch.save(timm.create_model("resnet18").state_dict(), path)
    assert "looks like weights for 'resnet18': choose --network resnet18" in refusal(path)


def test_architectures_that_timm_cannot_build_on_the_meta_device_are_left_out(
    state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "downloaded.safetensors"
    save_file(state, path)
    create = timm.create_model

    def on_meta(name: str, **how: Any) -> nn.Module:
        if torch.get_default_device().type == "meta":
            raise NotImplementedError("aten::_unique2: attempted to run this operator with Meta tensors")
        return create(name, **how)

    monkeypatch.setattr(timm, "create_model", on_meta)
    message = refusal(path, "test_vit")
    assert "does not fit the network 'test_vit'" in message
    assert "looks like" not in message


def test_the_name_of_a_file_helps_to_recognize_it(state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "test_resnet-v2.safetensors"
    save_file(state, path)
    assert "looks like weights for 'test_resnet'" in refusal(path, "test_vit")


def efficientnet(path: Path) -> Path:
    state = timm.create_model("tf_efficientnet_lite0").state_dict()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.half() for name, value in state.items()}, path)
    return path


def test_architectures_of_the_same_shapes_are_all_named(tmp_path: Path) -> None:
    message = refusal(efficientnet(tmp_path / "downloaded.safetensors"))
    assert "fits the networks 'efficientnet_lite0', 'tf_efficientnet_lite0'" in message
    assert "compute differently" in message


@pytest.mark.parametrize(
    "name",
    [
        "tf_efficientnet_lite0_in1k_fp16.safetensors",
        "best-tf_efficientnet_lite0.safetensors",
        "models--timm--tf_efficientnet_lite0.in1k/snapshots/a1b2/model.safetensors",
    ],
)
def test_of_several_the_one_that_the_file_is_called_after(tmp_path: Path, name: str) -> None:
    message = refusal(efficientnet(tmp_path / name))
    assert "looks like weights for 'tf_efficientnet_lite0': choose --network tf_efficientnet_lite0" in message
    assert "Tensors of the same shapes, but other padding or normalization: 'efficientnet_lite0'" in message


def test_the_description_beside_a_file_says_what_it_is(tmp_path: Path) -> None:
    path = efficientnet(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architecture": "tf_efficientnet_lite0"}')
    assert "looks like weights for 'tf_efficientnet_lite0'" in refusal(path)


def test_a_file_called_after_a_twin_is_loaded_with_a_warning(tmp_path: Path) -> None:
    path = efficientnet(tmp_path / "tf_efficientnet_lite0.safetensors")
    with pytest.warns(UserWarning, match="named after the network 'tf_efficientnet_lite0'"):
        build_featurizer("efficientnet_lite0", SHAPE, {}, path)
    build_featurizer("tf_efficientnet_lite0", SHAPE, {}, path)  # without one: warnings are errors here


def test_a_state_dict_without_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pth"
    torch.save({0: torch.zeros(2), 1: torch.zeros(3)}, path)
    assert "holds no tensors by name" in refusal(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: torch.full_like(value, float("nan")), "contains NaN or inf"),
        (lambda value: value.to(torch.complex64), "sparse, quantized, complex or empty"),
        (lambda value: value.to_sparse(), "sparse, quantized, complex or empty"),
        (lambda value: value.to("meta"), "sparse, quantized, complex or empty"),
        (lambda value: value.to(torch.int8), "conv1.0.weight holds integers"),
    ],
)
def test_tensors_that_are_no_weights(
    change: Callable[[Tensor], Tensor], message: str, state: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "odd.pth"
    torch.save({**state, "conv1.0.weight": change(state["conv1.0.weight"])}, path)
    assert message in refusal(path)


def test_the_content_of_a_file_decides_how_it_is_read(state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "renamed.bin")
    torch.save(state, tmp_path / "renamed.safetensors")
    for name in ("renamed.bin", "renamed.safetensors"):
        assert_same_body(build_featurizer("test_resnet", SHAPE, {}, tmp_path / name)(), state)


@pytest.mark.parametrize("content", [b"hello world", b"\x80\x04\x95", b"\x1f\x8b000", b"PK\3\4"])
def test_other_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(content)
    assert "cannot be read as a PyTorch file" in refusal(tmp_path / "x.pth")


class Opinion:
    """Something that is no tensor."""


def test_files_that_cannot_be_read(state: dict[str, Tensor], tmp_path: Path) -> None:
    assert "no weights file" in refusal(tmp_path / "nowhere.pth")
    assert "no weights file" in refusal(tmp_path)

    torn = tmp_path / "torn.safetensors"
    save_file(state, torn)
    torn.write_bytes(torn.read_bytes()[:5000])
    assert "cannot be read as safetensors" in refusal(torn)

    torch.save(state, tmp_path / "whole.pth")
    for size in (0, 10, 5000):
        part = tmp_path / f"torn{size}.pth"
        part.write_bytes((tmp_path / "whole.pth").read_bytes()[:size])
        assert "cannot be read as a PyTorch file" in refusal(part)

    objects = tmp_path / "objects.pth"
    torch.save({"state_dict": state, "opinion": Opinion()}, objects)
    assert "Python objects" in refusal(objects)

    nothing = tmp_path / "nothing.pth"
    torch.save({"epoch": 3}, nothing)
    assert "no tensors" in refusal(nothing)


@pytest.mark.shared_data
def test_real_efficientnet_weights() -> None:
    folder = os.environ.get("SANDMASK_TEST_DATA", "")
    path = Path(folder) / "weights" / "tf_efficientnet_lite0_in1k_fp16.safetensors"
    if not folder or not path.is_file():
        pytest.skip(f"SANDMASK_TEST_DATA does not name a folder with weights/{path.name}")
    build = build_featurizer("tf_efficientnet_lite0", (3, 224, 224), {}, path)
    built = build()
    assert built.n_features == 1280
    weights = load_weights(path)
    assert isinstance(built, Backbone)
    for name, value in built.model.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(value, weights[name])

    # With the file's own classifier on the features: what the whole timm model computes.
    plain = timm.create_model("tf_efficientnet_lite0")
    plain.load_state_dict(weights, strict=False)
    x = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(0)) * 2 - 1
    head = nn.functional.linear(built(x), weights["classifier.weight"], weights["classifier.bias"])
    torch.testing.assert_close(head, plain.eval()(x), rtol=1e-3, atol=1e-3)
    assert "'tf_efficientnet_lite0'" in refusal(path, "resnet18", (3, 64, 64))
