"""What a hidden layer does with numbers that float16 cannot hold."""

import torch
from torch.func import vmap

from sandmask.functional.dense import dense, layer_of_runs


def test_a_layer_saturates_in_evaluation_as_in_training() -> None:
    x, weight, bias = torch.full((2, 3, 4), 300.0), torch.full((2, 5, 4), 300.0), torch.zeros(2, 5)
    low_x, low_weight, low_bias = (tensor.to(torch.float16) for tensor in (x, weight, bias))
    trained, evaluated = layer_of_runs(low_x, low_weight, low_bias), vmap(dense)(low_x, low_weight, low_bias)
    assert torch.equal(trained, evaluated)
    assert (evaluated == torch.finfo(torch.float16).max).all()
    assert torch.equal(dense(low_x[0], low_weight[0], low_bias[0]), evaluated[0])
    assert (vmap(dense)(x, weight, bias) == 360_000).all()


def test_what_is_no_number_stays_visible() -> None:
    x = torch.full((1, 4), torch.nan, dtype=torch.float16)
    assert dense(x, torch.ones(2, 4, dtype=torch.float16), torch.zeros(2, dtype=torch.float16)).isnan().all()
