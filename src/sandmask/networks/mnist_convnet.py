"""The paper's MNIST ConvNet (appendix, table "Details of our MNIST ConvNet architecture")."""

from torch import Tensor, nn

from sandmask.functional.dropout import Dropout
from sandmask.networks._base import Featurizer


class MNISTConvNet(Featurizer):
    """Four 3 x 3 convolutions, each with ReLU and group normalization; average pooling; 128 features."""

    n_features = 128
    stacks = False  # `vmap` makes grouped convolutions of K runs' ones: slower, on every device, than K of them

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        sizes = [(n_channels, 64, 1), (64, 128, 2), (128, 128, 1), (128, 128, 1)]
        blocks: list[nn.Module] = []
        for n_in, n_out, stride in sizes:
            blocks += [nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1), nn.ReLU(), nn.GroupNorm(8, n_out)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor, drop: Dropout | None = None) -> Tensor:  # noqa: ARG002 - has no dropout layer
        """The features."""
        return self.blocks(x).mean((2, 3))  # type: ignore[no-any-return]
