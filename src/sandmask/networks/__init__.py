"""Networks as pure functions: an MLP, the MNIST ConvNet, and any timm backbone by name."""

from sandmask.networks._base import Featurizer, Network
from sandmask.networks.mlp import MLP
from sandmask.networks.mnist_convnet import MNISTConvNet

__all__ = ["MLP", "Featurizer", "MNISTConvNet", "Network"]
