"""Networks as pure functions: an MLP, the MNIST ConvNet, and any timm backbone by name.

`build_featurizer` goes from a name to a function that builds the featurizer; `Network` puts a classifier on
it and is what algorithms train. timm is imported when a backbone is asked for, not before.
"""

from sandmask.networks._base import Featurizer, Network
from sandmask.networks._build import NetworkEntry, build_featurizer, suggested_networks
from sandmask.networks._timm import normalization
from sandmask.networks.backbone import Backbone
from sandmask.networks.mlp import MLP
from sandmask.networks.mnist_convnet import MNISTConvNet
from sandmask.networks.weights import load_weights

__all__ = [
    "MLP",
    "Backbone",
    "Featurizer",
    "MNISTConvNet",
    "Network",
    "NetworkEntry",
    "build_featurizer",
    "load_weights",
    "normalization",
    "suggested_networks",
]
