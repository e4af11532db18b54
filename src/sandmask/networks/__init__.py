"""Networks as pure functions: an MLP, the MNIST ConvNet, any timm backbone by name, and modules of one's own.

`build_featurizer` goes from a name to a function that builds the featurizer; `Network` puts a classifier on
it and is what algorithms train. timm is imported when a backbone is asked for, not before.
"""

from sandmask.networks._base import Featurizer, Network
from sandmask.networks._build import build_featurizer, suggested_networks
from sandmask.networks._registry import NETWORKS, NetworkEntry
from sandmask.networks._timm import normalization
from sandmask.networks.backbone import Backbone
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
    "suggested_networks",
]
