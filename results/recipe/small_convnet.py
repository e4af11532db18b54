"""A network plugin for digits of 14 x 14 pixels: three convolutions, whose features keep their positions."""

from torch import nn

from sandmask.networks import NETWORKS, NetworkEntry


def build(input_shape: tuple[int, ...]) -> nn.Module:
    """Inputs `[N, 1, 14, 14]` to features `[N, 512]`."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
    )


NETWORKS.register(NetworkEntry(name="small-convnet", summary="Three convolutions with 16 to 32 channels", build=build))
