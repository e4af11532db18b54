"""Networks as pure functions: an MLP, the MNIST ConvNet, any timm backbone by name, and your own modules.

`build_featurizer` takes a name and returns a function that builds the featurizer. `Network` adds a classifier and is
what algorithms train. timm is imported only for backbones.
"""

from sandmask.networks._build import build_featurizer
from sandmask.networks._timm import normalization
from sandmask.networks.backbone import Backbone
from sandmask.networks.featurizer import NETWORKS, Featurizer, NetworkEntry
from sandmask.networks.network import Network
from sandmask.networks.own import NetworkReport, inspect_module
from sandmask.networks.small import MLP, MNISTConvNet
from sandmask.networks.weights import load_weights

__all__ = [
    "MLP",
    "NETWORKS",
    "Backbone",
    "Featurizer",
    "MNISTConvNet",
    "Network",
    "NetworkEntry",
    "NetworkReport",
    "build_featurizer",
    "inspect_module",
    "load_weights",
    "normalization",
]
