"""Programs whose images are read while they run, against the same images from one tensor."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils import _pytree as pytree

from sandmask.datasets import Dataset, ImageDataset, load_dataset
from sandmask.datasets._lookup import dataset_entry
from sandmask.functional import random
from sandmask.records import RunSpec
from sandmask.training import Stack, make_spec
from sandmask.training.cuda_graph import Carry, Program
from sandmask.training.minibatches import AUGMENT, INDICES, STEPS_DRAWN

STEPS = STEPS_DRAWN + 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    for domain in ("art", "photo", "sketch"):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / domain / name
            folder.mkdir(parents=True)
            for number in range(4):
                pixels = torch.randint(256, (5, 5, 3), dtype=torch.uint8, generator=generator)
                Image.fromarray(pixels.numpy()).resize((40, 30)).save(folder / f"{number}.png")
    return tmp_path / "images"


def images(root: Path, cache: str = "memory") -> ImageDataset:
    loaded = load_dataset(root, image_size=32, cache=cache)
    assert isinstance(loaded, ImageDataset)
    return loaded


def spec_of(root: Path, algorithm: str, hparams: dict[str, float] | None) -> RunSpec:
    values = {"batch_size": 3, "lr": 1e-3, **({"tau": 0.4} if algorithm == "SANDMask" else {}), **(hparams or {})}
    options = {"network": "test_resnet.r160_in1k", "weights": "none", "steps": STEPS}
    return make_spec(dataset_entry(root), algorithm, [0], hparams=values, **options)  # type: ignore[arg-type]


def stack_of(
    root: Path,
    dataset: Dataset,
    device: str = "cpu",
    algorithm: str = "SANDMask",
    hparams: dict[str, float] | None = None,
) -> Stack:
    return Stack([spec_of(root, algorithm, hparams)], dataset, torch.device(device), weights="none")


def trained(stack: Stack, steps: int, *, fast: bool) -> list[Tensor]:
    nowhere = torch.full((stack.n_runs,), -1, device=stack.device)
    run = Program(stack, Carry(stack.init(), {}, nowhere), fast=fast)
    while run.done < steps:
        run.advance(steps - run.done)
    run.close()
    return [leaf.cpu() for leaf in pytree.tree_leaves(run.carry.tree())]


@pytest.mark.parametrize("hparams", [{}, {"class_balanced": 1}, {"data_augmentation": 0}])
def test_minibatches_are_those_of_the_step(root: Path, hparams: dict[str, float]) -> None:
    """Read with numbers that the host draws for many steps together; expected one by one from their definition."""
    stack = stack_of(root, images(root), hparams=hparams)
    assert not stack.dataset.resident
    for step, batch in enumerate(stack.feed(2), 2):
        keys = random.fold(stack.keys, step)
        indices = stack.sampler(random.fold(keys, INDICES))
        assert torch.equal(batch.x, stack.dataset.training_inputs(indices, random.fold(keys, AUGMENT)))
        assert torch.equal(batch.y, stack.dataset.labels[indices])
    assert step == STEPS - 1


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_a_program_that_is_fed_trains_as_one_that_is_not(root: Path, cache: str) -> None:
    resident = images(root)
    resident._feed.place = "device"
    expected = trained(stack_of(root, resident), 4, fast=True)
    found = trained(stack_of(root, images(root, cache)), 4, fast=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("resumed", [0, 3])
def test_images_for_a_captured_step_arrive_in_one_place(
    root: Path, resumed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that is called again and again in place of a graph, also from the middle of the training on."""
    stack = stack_of(root, images(root))
    expected = trained(stack, 6, fast=False)
    start = Program(stack, Carry(stack.init(), {}, torch.full((1,), -1)))
    while start.done < resumed:
        start.advance(1)
    start.close()
    monkeypatch.setattr(Program, "_capture", lambda _, function, warm_up: (warm_up(), function)[1])
    program = Program(stack, start.carry)
    program._captures = True
    while program.done < 6:
        program.advance(6)
    program.close()
    assert program._step is not None
    found = pytree.tree_leaves(program.carry.tree())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class InTurns(ImageDataset):
    """A dataset of one's own that knows nothing of `read_batches`."""

    read_batches = Dataset.read_batches
    prepare = Dataset.prepare


def test_datasets_that_prepare_nothing(root: Path) -> None:
    own = images(root)
    own.__class__ = InTurns
    expected = list(stack_of(root, images(root)).feed(0))
    for one, other in zip(stack_of(root, own).feed(0), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Inverted(ImageDataset):
    """Images whose training has its own way, one by one."""

    def training_inputs(self, indices: Tensor, key: Tensor) -> Tensor:
        return -super().training_inputs(indices, key)


class InvertedAhead(ImageDataset):
    """The same, for those that are read ahead."""

    def training_batches(self, requests: Iterable[tuple[Tensor, Tensor]], depth: int = 4) -> Iterator[Tensor]:
        for inputs in super().training_batches(requests, depth):
            yield -inputs


@pytest.mark.parametrize("kind", [Inverted, InvertedAhead])
def test_datasets_that_change_their_training_images(root: Path, kind: type[ImageDataset]) -> None:
    own = images(root)
    own.__class__ = kind
    expected = list(stack_of(root, images(root)).feed(0))
    for one, other in zip(stack_of(root, own).feed(0), expected, strict=True):
        assert torch.equal(one.x, -other.x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_images_that_travel_while_the_gpu_computes(root: Path) -> None:
    """They are those that are on the GPU already, to the bit, however busy it is."""
    resident, fed = (stack_of(root, images(root, cache), "cuda") for cache in ("device", "memory"))
    expected = resident.batches(torch.tensor(0, device="cuda"), STEPS)
    load, found = torch.randn(4096, 4096, device="cuda"), []
    for batch in fed.feed(0):
        load = (load @ load).clamp_(-1.0, 1.0)
        found.append([field.clone() for field in batch])
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("algorithm", ["ERM", "SANDMask"])
def test_a_captured_program_that_is_fed(root: Path, algorithm: str) -> None:
    """The loss agrees, and nearly all elements of the state: Adam turns the rounding of a zero gradient into steps."""
    found = {
        (cache, fast): trained(stack_of(root, images(root, cache), "cuda", algorithm), STEPS, fast=fast)
        for cache in ("device", "memory")
        for fast in (False, True)
    }
    expected = found["device", False]
    for other in found.values():
        for one, two in zip(other, expected, strict=True):
            alike = torch.isclose(one, two, rtol=1e-3, atol=1e-3)
            assert alike.double().mean() > 0.99
