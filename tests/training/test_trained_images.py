"""Trained image models: pixels, normalization and frozen batch-norm statistics travel with the run."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sandmask.datasets import ImageDataset, dataset_entry, load_dataset, scan_images
from sandmask.errors import SandmaskError
from sandmask.networks import backbone
from sandmask.records import RunRecord
from sandmask.training import RunFolder, load_run, make_spec, split_environment

SIZE = 32
CPU = torch.device("cpu")


def draw_images(root: Path) -> Path:
    """Three domains of dark or bright, noisy rectangles."""
    draws = np.random.RandomState(0)
    for domain in ("ink", "photo", "sketch"):
        for number, name in enumerate(("bright", "dark")):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for i in range(5):
                coarse = draws.randint(0, 160, (6, 6, 3)) + 95 * (1 - number)
                Image.fromarray(coarse.astype(np.uint8)).resize((50 + i, 40)).save(folder / f"{i}.png")
    return root


def save_weights(path: Path, name: str) -> dict[str, Tensor]:
    """A weights file with batch-norm statistics as after training, far from zeros and ones."""
    draws = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(name)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.uniform_(-0.5, 0.5, generator=draws)
            part.running_var.uniform_(0.2, 2.0, generator=draws)
    weights: dict[str, Tensor] = model.state_dict()
    save_file(weights, path)
    return weights


@dataclass(frozen=True)
class Trained:
    """A run's folder, and what it was trained on; the dataset and the weights file are gone from the disk."""

    run: Path
    record: RunRecord
    files: list[Path]
    inputs: Tensor
    labels: Tensor
    splits: list[tuple[Tensor, Tensor]]
    weights: dict[str, Tensor]


def train(
    folder: Path,
    network: str,
    algorithm: str = "ERM",
    precision: str = "fp32",
    steps: int = 4,
    device: torch.device = CPU,
) -> Trained:
    root = draw_images(folder / "images")
    weights = save_weights(folder / "weights.safetensors", network)
    dataset = load_dataset(root, image_size=SIZE)
    assert isinstance(dataset, ImageDataset)
    spec = make_spec(
        dataset_entry(root), algorithm, [0], steps=steps, hparams={"batch_size": 4, "lr": 1e-3},
        network=network, weights=str(folder / "weights.safetensors"), precision=precision,
    )  # fmt: skip
    record = RunFolder(folder / "run").train(spec, dataset, device, weights=str(folder / "weights.safetensors"))
    tree = scan_images(root)
    shutil.copytree(root, folder / "elsewhere")
    files = [folder / "elsewhere" / tree.path(i).relative_to(root) for i in range(len(tree.paths))]
    cfg = timm.get_pretrained_cfg(network)
    assert cfg is not None
    inputs = dataset.normalized_by(cfg.mean, cfg.std).inputs(torch.arange(len(files)))
    splits = [split_environment(dataset, env, 0) for env in range(3)]
    dataset.close()
    shutil.rmtree(root)
    (folder / "weights.safetensors").unlink()
    return Trained(folder / "run", record, files, inputs, dataset.labels, splits, weights)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("resnet"), "test_resnet")


def assert_reproduces(trained: Trained, probabilities: Tensor) -> None:
    right = probabilities.argmax(-1) == trained.labels
    found = [[float(right[numbers].double().mean()) for numbers in pair] for pair in trained.splits]
    np.testing.assert_allclose(trained.record.accuracy_in[-1], [inside for inside, _ in found], rtol=1e-15)
    np.testing.assert_allclose(trained.record.accuracy_out[-1], [outside for _, outside in found], rtol=1e-15)


def test_files_alone_give_the_accuracies_of_the_last_evaluation(trained: Trained) -> None:
    run = load_run(trained.run)
    assert run.classes == ("bright", "dark")
    assert run.environments == ("ink", "photo", "sketch")
    assert_reproduces(trained, run.predict(trained.files))
    assert_reproduces(trained, run.predict(trained.files, batch_size=7))
    assert_reproduces(trained, run.predict(trained.inputs))


def test_preprocessing_is_that_of_evaluation_bit_by_bit(trained: Trained) -> None:
    run = load_run(trained.run)
    assert run.info.preprocessing.mean == (0.5, 0.5, 0.5)  # the network's, not what datasets have by default
    assert torch.equal(run.preprocess(trained.files), trained.inputs)
    assert torch.equal(run.preprocess([str(file) for file in trained.files[:2]]), trained.inputs[:2])
    assert torch.equal(run.preprocess(trained.files[3]), trained.inputs[3:4])
    pictures = [Image.open(file) for file in trained.files[:4]]
    assert torch.equal(run.preprocess(pictures), trained.inputs[:4])
    arrays = [np.asarray(picture) for picture in pictures]
    assert torch.equal(run.preprocess(arrays), trained.inputs[:4])
    assert torch.equal(run.preprocess(arrays[0][None]), trained.inputs[:1])
    tensors = [torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays]
    assert torch.equal(run.preprocess(tensors), trained.inputs[:4])
    assert torch.equal(run.preprocess([tensors[0], trained.files[1], trained.inputs[2]]), trained.inputs[:3])


def test_grey_pictures_are_shown_in_grey(trained: Trained) -> None:
    run = load_run(trained.run)
    grey = np.arange(40 * 50, dtype=np.uint8).reshape(40, 50)
    expected = run.preprocess([np.stack([grey] * 3, axis=-1)])
    assert torch.equal(run.preprocess([grey]), expected)
    assert torch.equal(run.preprocess([torch.from_numpy(grey)]), expected)
    assert torch.equal(run.preprocess(Image.fromarray(grey)), expected)


def plain_logits(trained: Trained, name: str, statistics: dict[str, Tensor]) -> Tensor:
    """The model put together by hand: timm's, with the run's weights and batch-norm statistics from elsewhere."""
    prefix = "params.featurizer.model."
    stored = load_file(trained.run / "model.safetensors")
    model = timm.create_model(name, num_classes=0)
    learned = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
    kept = {key: value for key, value in statistics.items() if "running_" in key}
    missing = model.load_state_dict({**learned, **kept}, strict=False).missing_keys
    assert all(key.endswith("num_batches_tracked") for key in missing)
    with torch.no_grad():
        features = model.eval()(trained.inputs)
    logits: Tensor = features @ stored["params.classifier.weight"].T + stored["params.classifier.bias"]
    return logits


def test_batch_norm_statistics_travel(trained: Trained) -> None:
    run = load_run(trained.run)
    logits = run.logits(trained.files)
    torch.testing.assert_close(logits, plain_logits(trained, "test_resnet", trained.weights), rtol=1e-4, atol=1e-5)
    fresh = timm.create_model("test_resnet").state_dict()
    assert not torch.allclose(logits, plain_logits(trained, "test_resnet", fresh), rtol=1e-2, atol=1e-2)


def test_the_module_has_the_statistics_too(trained: Trained) -> None:
    run = load_run(trained.run)
    module = run.module()
    with torch.no_grad():
        torch.testing.assert_close(module(trained.inputs), run.logits(trained.inputs))
    state = module.state_dict()
    assert torch.equal(state["featurizer.model.bn1.running_var"], trained.weights["bn1.running_var"])
    with torch.no_grad():
        module.train()  # frozen: the backbone stays in evaluation mode
        torch.testing.assert_close(module(trained.inputs), run.logits(trained.inputs))


@pytest.mark.parametrize(
    ("network", "algorithm", "precision"),
    [("test_efficientnet", "MTL", "fp32"), ("test_resnet", "ARM", "fp32"), ("test_vit", "ERM", "bf16")],
)
def test_other_backbones_methods_and_precisions(network: str, algorithm: str, precision: str, tmp_path: Path) -> None:
    trained = train(tmp_path, network, algorithm, precision, steps=2)
    run = load_run(trained.run)
    if not run.uses_context:
        assert_reproduces(trained, run.predict(trained.files))
        return
    for env, pair in enumerate(trained.splits):  # each split is one batch of one environment
        for numbers, expected in zip(pair, (trained.record.accuracy_in, trained.record.accuracy_out), strict=True):
            right = run.predict([trained.files[i] for i in numbers]).argmax(-1) == trained.labels[numbers]
            assert float(right.double().mean()) == expected[-1][env]
    with torch.no_grad():
        torch.testing.assert_close(run.module()(trained.inputs), run.logits(trained.inputs))


def test_channels_last_weights_come_back_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone, "LARGE", 0)
    trained = train(tmp_path, "test_resnet", steps=2)
    run = load_run(trained.run)
    assert_reproduces(trained, run.predict(trained.files))
    expected = plain_logits(trained, "test_resnet", trained.weights)
    torch.testing.assert_close(run.logits(trained.files), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [np.zeros((4, 5, 2), np.uint8)], r"\[height, width, 3\].*Found \[4, 5, 2\]"),
        (lambda: [np.zeros((0, 5, 3), np.uint8)], r"Found \[0, 5, 3\]"),
        (lambda: [torch.zeros(4, 5, 3, dtype=torch.uint8)], r"\[3, height, width\] as uint8 tensors"),
        (lambda: [np.zeros((4, 5, 3))], r"of shape \[3, 32, 32\]\. Found the shape \[4, 5, 3\]"),
        (lambda: [None], "Found NoneType"),
        (lambda: ["nowhere.png"], r"nowhere\.png cannot be read"),
    ],
)
def test_what_is_no_image_is_told(make: Callable[[], object], message: str, trained: Trained) -> None:
    with pytest.raises(SandmaskError, match=message):
        load_run(trained.run).predict(make())


def test_a_file_that_is_no_image_is_named(trained: Trained, tmp_path: Path) -> None:
    for name, content in (("text.jpg", b"hello"), ("cut.png", trained.files[0].read_bytes()[:100])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SandmaskError, match=f"{name} cannot be decoded as an image") as caught:
            load_run(trained.run).predict([tmp_path / name])
        assert "skip_corrupt" not in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_of_the_gpu_predicts_there_and_on_the_cpu(precision: str, tmp_path: Path) -> None:
    trained = train(tmp_path, "test_resnet", precision=precision, device=torch.device("cuda"))
    there, here = load_run(trained.run, "cuda"), load_run(trained.run)
    assert_reproduces(trained, there.predict(trained.files).cpu())
    torch.backends.cudnn.allow_tf32 = True  # PyTorch's default, which the run's precision overrides
    tolerance = 1e-4 if precision == "fp32" else 0.05
    logits = there.logits(trained.files)
    assert logits.device.type == "cuda"
    torch.testing.assert_close(logits.cpu(), here.logits(trained.files), rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        module = there.module()
        torch.backends.cudnn.allow_tf32 = False
        out = module(there.preprocess(trained.files))
    torch.testing.assert_close(out.cpu(), here.module()(trained.inputs).detach(), rtol=1e-4, atol=1e-4)
