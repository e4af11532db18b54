"""Two linear layers in a row, the second one narrow: a featurizer's last layer, and the classifier on it.

(x W^T + b) V^T + c is x (V W)^T + (V b + c). With few classes, computed like this, nothing is as wide as the features,
forwards or backwards, and the layer costs next to nothing. The numbers are the same to rounding.
"""

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from sandmask.functional.head import head as classify

NARROW = 4  # times as many features as classes, from which on this pays


def linear_pair(x: Tensor, weight: Tensor, bias: Tensor, head: Tensor, head_bias: Tensor) -> Tensor:
    """(x W^T + b) V^T + c of x [N, in], W [features, in], b, V [classes, features] and c, in the precision of V.

    As for `head`, x may be wider than W by zeros, and x, W and b of a lower precision.
    """
    if has_torch_function((x, weight, bias, head, head_bias)):
        result: Tensor = handle_torch_function(
            linear_pair, (x, weight, bias, head, head_bias), x, weight, bias, head, head_bias
        )
        return result
    return classify(x, head @ weight.to(head.dtype), F.linear(bias.to(head.dtype), head, head_bias))


def plain_linear_pair(x: Tensor, weight: Tensor, bias: Tensor, head: Tensor, head_bias: Tensor) -> Tensor:
    """The same, one layer after the other."""
    return F.linear(F.linear(x, weight, bias), head, head_bias)
