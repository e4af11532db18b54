"""Moments that are folded next to each other against those of each parameter alone."""

import math

import pytest
import torch
from torch import Tensor

from sandmask.gradients._folding import Folding
from sandmask.gradients._tape import UnsupportedError
from sandmask.masks import GradientMoments, SANDMask, gradient_moments
from sandmask.masks import _base as evaluation
from sandmask.masks import _gpu as packing

ENVS = 16
SHAPES = {
    "large": (90, 110),
    "small": (300,),
    "scalar": (),
    "empty": (0, 3),
    "larger": (100, 120),
    "another": (18, 256),
}


def gradients_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(ENVS, *shape) + 0.5 for name, shape in shapes.items()}


def fold(gradients: dict[str, Tensor], unused: str = "") -> Folding:
    folding = Folding({name: grads[0] for name, grads in gradients.items()}, ENVS)
    for name, grads in gradients.items():
        if name != unused:
            folding.add(name, grads)
    return folding


def assert_folded(gradients: dict[str, Tensor], folding: Folding) -> None:
    assert set(folding.moments) == set(gradients)
    for name, grads in gradients.items():
        found, expected = folding.moments[name], gradient_moments(grads)
        assert found.count == expected.count
        for part in ("sign_sum", "mean", "m2"):
            torch.testing.assert_close(getattr(found, part), getattr(expected, part), msg=f"{name}: {part}")
            assert getattr(found, part).stride() == getattr(expected, part).stride()


@pytest.mark.parametrize("names", [list(SHAPES), ["large"], ["small", "scalar"], ["empty"]], ids=str)
def test_every_parameter_has_its_moments(names: list[str]) -> None:
    gradients = gradients_of({name: SHAPES[name] for name in names})
    assert_folded(gradients, fold(gradients))


def test_many_small_parameters() -> None:
    gradients = gradients_of({f"layer {i}": (64, 100) for i in range(14)})  # more than are folded together
    assert_folded(gradients, fold(gradients))


def test_other_dtypes_and_orders_in_memory() -> None:
    gradients = gradients_of({"first": (7,), "double": (5,), "half": (40,), "image": (4, 3, 3, 3)})
    gradients["double"] = gradients["double"].double()
    gradients["half"] = gradients["half"].bfloat16()
    gradients["image"] = gradients["image"].permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    assert_folded(gradients, fold(gradients))


def test_a_parameter_without_gradients_is_left_out() -> None:
    gradients = gradients_of(SHAPES)
    folding = fold(gradients, unused="small")
    assert_folded({name: grads for name, grads in gradients.items() if name != "small"}, folding)
    assert folding.all_finite()


def test_a_parameter_that_is_used_twice() -> None:
    gradients = gradients_of(SHAPES)
    with pytest.raises(UnsupportedError, match="twice"):
        fold(gradients).add("small", gradients["small"])


@pytest.mark.parametrize("name", ["large", "small"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_noticed(name: str, value: float) -> None:
    gradients = gradients_of(SHAPES)
    gradients[name][3].flatten()[5] = value
    assert not fold(gradients).all_finite()


def test_finite_gradients_whose_sum_is_infinite() -> None:
    largest = torch.finfo(torch.float32).max
    assert fold({"a": torch.full((ENVS, 40), largest), "b": torch.ones(ENVS, 2)}).all_finite()


def test_a_mask_reads_them_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = {name: grads for name, grads in gradients_of(SHAPES).items() if name != "empty"}
    like = {name: grads[0] for name, grads in gradients.items()}
    moments = GradientMoments.of_named(fold(gradients).moments, like)
    order = packing.in_memory_order(range(len(like)), moments.sums.mean)
    flat = packing.pack(moments.sums.take(order), ENVS)
    assert flat.mean.data_ptr() == moments.sums.mean[order[0]].data_ptr()
    found = SANDMask(0.1).from_moments(moments)
    monkeypatch.setattr(evaluation, "packs", lambda tensors: False)
    torch.testing.assert_close(found, SANDMask(0.1).from_moments(moments))
    assert list(found) == list(like)


def test_tensors_of_two_storages_are_no_neighbours() -> None:
    one, other = torch.arange(4.0), torch.arange(6.0)
    assert packing._joined([one[:2], one[2:]]) is not None
    assert packing._joined([one[:2], one[3:]]) is None
    assert packing._joined([one[:2], other[2:]]) is None
    assert packing._joined([other.view(2, 3).T, other[6:]]) is None
