"""The small networks of the benchmark: the MLP of Spirals and the ConvNet of the MNIST sets."""

import itertools
import math

from torch import Tensor, nn

from sandmask.functional.conv import conv_block, kernels_suit
from sandmask.functional.dense import Dropout, affine, dense
from sandmask.networks._timm import check_input_shape
from sandmask.networks.featurizer import NETWORKS, Featurizer, NetworkEntry


class MLP(Featurizer):
    """A multi-layer perceptron with `depth` linear layers, and ReLU and dropout between them.

    Its hidden layers have `width` outputs, and its last layer has `n_outputs`, or `width` if not given.
    """

    def __init__(self, n_inputs: int, width: int, depth: int, n_outputs: int | None = None) -> None:
        super().__init__()
        self.n_features = width if n_outputs is None else n_outputs
        sizes = [n_inputs] + [width] * (depth - 1) + [self.n_features]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in itertools.pairwise(sizes))

    @property
    def last(self) -> nn.Linear:
        """The last layer, which has no ReLU."""
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        return last

    def hidden(self, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """Return the input of the last layer."""
        x = x.flatten(1)
        for site, layer in enumerate(self.layers[:-1]):
            assert isinstance(layer, nn.Linear)
            x = dense(x, layer.weight, layer.bias, drop, site)
        return x

    def forward(self, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """Return the features."""
        return affine(self.hidden(x, drop), self.last.weight, self.last.bias)


class MNISTConvNet(Featurizer):
    """Four 3 x 3 convolutions with ReLU and group normalization, then average pooling to 128 features."""

    n_features = 128
    stacks = False  # under `vmap`, K convolutions become a grouped one, which is slower on every device

    @property
    def has_kernels(self) -> bool:
        """Whether the precision is one for which convolutions have kernels: TF32, half precision or `fp32x3`."""
        return kernels_suit()

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        sizes = [(n_channels, 64, 1), (64, 128, 2), (128, 128, 1), (128, 128, 1)]
        blocks: list[nn.Module] = []
        for n_in, n_out, stride in sizes:
            blocks += [nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1), nn.ReLU(), nn.GroupNorm(8, n_out)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor, drop: Dropout | None = None) -> Tensor:  # noqa: ARG002 - has no dropout layer
        """Return the features."""
        last = self.blocks[-1]
        for convolution, _, norm in zip(*[iter(self.blocks)] * 3, strict=True):
            assert isinstance(convolution, nn.Conv2d)
            assert isinstance(norm, nn.GroupNorm)
            assert convolution.bias is not None
            own = (convolution.weight, convolution.bias, norm.weight, norm.bias)
            x = conv_block(x, *own, stride=convolution.stride[0], groups=norm.num_groups, pooled=norm is last)
        return x


def _mlp(input_shape: tuple[int, ...], mlp_width: int, mlp_depth: int) -> Featurizer:
    return MLP(math.prod(input_shape), mlp_width, mlp_depth)


def _convnet(input_shape: tuple[int, ...]) -> Featurizer:
    check_input_shape("mnist-convnet", input_shape)
    return MNISTConvNet(input_shape[0])


NETWORKS.register(
    NetworkEntry("mlp", "multi-layer perceptron; width and depth are hyperparameters (default for Spirals)", _mlp)
)
NETWORKS.register(
    NetworkEntry("mnist-convnet", "four convolutions, 128 features (default for the MNIST sets)", _convnet)
)
