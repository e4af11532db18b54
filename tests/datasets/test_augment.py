import itertools
import math

import pytest
import torch
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as tv

from sandmask.datasets import Augmentation
from sandmask.datasets._augment import CROP_TRIES, crop, crop_boxes, jitter, shift_hue, to_gray
from sandmask.functional.random import fold, key_of

SCALE, RATIO = (0.7, 1.0), (3 / 4, 4 / 3)


def pictures(n: int, size: int = 12) -> Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(n))


def test_hue_equals_torchvision() -> None:
    images = torch.cat([pictures(8), torch.zeros(1, 3, 12, 12), torch.ones(1, 3, 12, 12), pictures(1).round()])
    shifts = torch.linspace(-0.5, 0.5, len(images))
    expected = torch.stack([tv.adjust_hue(x, shift) for x, shift in zip(images, shifts.tolist(), strict=True)])
    torch.testing.assert_close(shift_hue(images, shifts), expected, atol=1e-5, rtol=0)


def test_gray_equals_torchvision() -> None:
    images = pictures(3)
    torch.testing.assert_close(to_gray(images), tv.rgb_to_grayscale(images))


def test_jitter_equals_torchvision_in_every_order() -> None:
    orders = torch.tensor(list(itertools.permutations(range(4))))
    n = len(orders)
    images = pictures(n)
    generator = torch.Generator().manual_seed(0)
    factors = 0.5 + torch.rand(n, 3, generator=generator)
    hues = torch.rand(n, generator=generator) - 0.5
    for image, order, factor, hue, got in zip(
        images,
        orders.tolist(),
        factors.tolist(),
        hues.tolist(),
        jitter(images, factors, hues, orders),
        strict=True,
    ):
        operations = (
            lambda x, f=factor[0]: tv.adjust_brightness(x, f),
            lambda x, f=factor[1]: tv.adjust_contrast(x, f),
            lambda x, f=factor[2]: tv.adjust_saturation(x, f),
            lambda x, f=hue: tv.adjust_hue(x, f),
        )
        expected = image
        for operation in order:
            expected = operations[operation](expected)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def naive_box(draws: list[float], aspect: float) -> list[float]:
    """torchvision's loop on an image of width `aspect` and height 1."""
    for area_draw, ratio_draw in zip(draws[:CROP_TRIES], draws[CROP_TRIES : 2 * CROP_TRIES], strict=True):
        area = aspect * (0.7 + 0.3 * area_draw)
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * ratio_draw)
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= aspect and h <= 1:
            left, top = draws[-2] * (aspect - w), draws[-1] * (1 - h)
            return [left / aspect, top, w / aspect, h]
    ratio = min(max(aspect, 3 / 4), 4 / 3)
    w, h = (aspect, aspect / ratio) if aspect < ratio else (ratio, 1.0)
    return [(aspect - w) / 2 / aspect, (1 - h) / 2, w / aspect, h]


@pytest.mark.parametrize("aspect", [1.0, 4 / 3, 0.6, 3.0, 0.2])
def test_crop_boxes_equal_the_naive_twin(aspect: float) -> None:
    draws = torch.rand(300, 2 * CROP_TRIES + 2, generator=torch.Generator().manual_seed(0))
    boxes = crop_boxes(draws, torch.full((300,), aspect), SCALE, RATIO)
    expected = torch.tensor([naive_box(row, aspect) for row in draws.tolist()])
    torch.testing.assert_close(boxes, expected, atol=1e-5, rtol=1e-4)
    assert boxes.min() >= -1e-6
    assert (boxes[:, :2] + boxes[:, 2:]).max() <= 1 + 1e-6


@pytest.mark.parametrize(("height", "width"), [(300, 300), (300, 400)])
def test_crop_boxes_are_distributed_as_torchvisions(height: int, width: int) -> None:
    torch.manual_seed(0)
    blank = torch.empty(3, height, width)
    theirs = torch.tensor([RandomResizedCrop.get_params(blank, SCALE, RATIO) for _ in range(3000)]).float()
    theirs = theirs[:, [1, 0, 3, 2]] / torch.tensor([width, height, width, height])
    draws = torch.rand(3000, 2 * CROP_TRIES + 2)
    ours = crop_boxes(draws, torch.full((3000,), width / height), SCALE, RATIO)
    levels = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    torch.testing.assert_close(ours.quantile(levels, dim=0), theirs.quantile(levels, dim=0), atol=0.02, rtol=0)


def test_crop_without_resizing_is_a_slice() -> None:
    images = pictures(2, 16)
    boxes = torch.tensor([[4 / 16, 2 / 16, 8 / 16, 8 / 16], [0, 8 / 16, 8 / 16, 8 / 16]])
    got = crop(images, boxes, torch.tensor([False, True]), 8)
    torch.testing.assert_close(got[0], images[0, :, 2:10, 4:12])
    torch.testing.assert_close(got[1], images[1, :, 8:16, 0:8].flip(-1))


def test_crop_with_resizing_equals_torchvision_away_from_the_edge() -> None:
    images = pictures(1, 40)
    boxes = torch.tensor([[6 / 40, 4 / 40, 30 / 40, 33 / 40]])
    got = crop(images, boxes, torch.tensor([False]), 28)
    expected = tv.resized_crop(images, 4, 6, 33, 30, [28, 28], antialias=False)
    torch.testing.assert_close(got[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1], atol=1e-5, rtol=0)


def test_every_image_has_its_own_draws_whatever_its_neighbours() -> None:
    augment = Augmentation(size=10)
    images = pictures(1).expand(6, -1, -1, -1)
    got = augment(images, key_of(3))
    assert len({tuple(x.flatten().tolist()) for x in got}) == 6
    torch.testing.assert_close(augment(images[:4], key_of(3)), got[:4], atol=0, rtol=0)
    batch = pictures(12).reshape(3, 4, 3, 12, 12)
    grid = augment(batch, key_of(3))
    assert grid.shape == (3, 4, 3, 10, 10)
    part = augment(batch[:2, :3], key_of(3))
    torch.testing.assert_close(part, grid[:2, :3])


def test_a_stack_of_runs_is_augmented_as_each_run_alone() -> None:
    augment = Augmentation(size=10)
    batch = pictures(12).reshape(3, 4, 3, 12, 12)
    keys = torch.stack([key_of(seed) for seed in range(3)])
    together = augment(batch, keys)
    for run in range(3):
        assert torch.equal(together[run], augment(batch[run], keys[run]))
        assert torch.equal(together[run : run + 1], augment(batch[run : run + 1], keys[run : run + 1]))


def test_key_decides() -> None:
    augment = Augmentation(size=10)
    images = pictures(3)
    assert torch.equal(augment(images, key_of(1)), augment(images, key_of(1)))
    assert not torch.equal(augment(images, key_of(1)), augment(images, fold(key_of(1), 0)))
    state = torch.random.get_rng_state()
    augment(images, key_of(1))
    assert torch.equal(state, torch.random.get_rng_state())


def test_bytes_and_floats_alike() -> None:
    pixels = (pictures(3) * 255).to(torch.uint8)
    augment = Augmentation(size=10)
    torch.testing.assert_close(augment(pixels, key_of(1)), augment(pixels / 255, key_of(1)))


def test_results_stay_between_0_and_1_and_some_are_gray() -> None:
    got = Augmentation(size=8)(pictures(600, 9), key_of(0))
    assert got.min() >= 0
    assert got.max() <= 1
    gray = (got.amax(1) - got.amin(1)).flatten(1).amax(1) < 1e-6
    assert 0.06 < gray.float().mean() < 0.14


def test_half_of_the_images_are_flipped() -> None:
    ramp = torch.linspace(0, 1, 9).expand(400, 3, 9, 9)
    quiet = Augmentation(size=9, scale=(1, 1), ratio=(1, 1), brightness=0, contrast=0, saturation=0, hue=0, grayscale=0)
    got = quiet(ramp, key_of(0))
    flipped = got[:, 0, 0, 0] > got[:, 0, 0, -1]
    assert 0.4 < flipped.float().mean() < 0.6
    torch.testing.assert_close(torch.where(flipped[:, None, None, None], got.flip(-1), got), ramp, atol=1e-5, rtol=0)


def test_a_single_image() -> None:
    assert Augmentation(size=10)(pictures(1)[0], key_of(0)).shape == (3, 10, 10)


def test_crops_respect_the_original_shape() -> None:
    """A wide picture, squeezed to a square: what is square in the original is narrow in the store."""
    draws = torch.rand(500, 2 * CROP_TRIES + 2, generator=torch.Generator().manual_seed(0))
    wide = crop_boxes(draws, torch.full((500,), 1.6), SCALE, RATIO)
    shape = 1.6 * wide[:, 2] / wide[:, 3]
    assert shape.max() <= 4 / 3 + 1e-5
    assert wide[:, 2].mean() < 0.85
    assert wide[:, 3].mean() > 0.9
