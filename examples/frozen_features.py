"""Compare methods on the features of a pretrained network, which is not trained: seconds per run instead of hours.

The script passes all images through the network once and writes features, classes and domains to an .npz file, which
is a dataset for all commands:

    python examples/frozen_features.py PACS features.npz --network vit_small_patch14_dinov2.lvd142m
    sandmask sweep run runs/features --datasets features.npz --algorithms ERM,CORAL,SANDMask --hparam batch_size=64

Images are resized and normalized as in evaluations, without augmentation.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sandmask.datasets import ImageDataset, load_dataset
from sandmask.networks import build_featurizer, normalization

BATCH = 64


@torch.no_grad()
def features_of(images: ImageDataset, network: str, weights: str, device: torch.device) -> Tensor:
    """The features [N, F] of all images, in their order."""
    featurizer = build_featurizer(network, images.input_shape, {}, weights)().to(device)
    images = images.normalized_by(*normalization(network)).to(device)
    found = []
    for x in images.batches(torch.split(torch.arange(len(images.labels)), BATCH)):
        found.append(featurizer(x).cpu())
        print(f"\r{sum(map(len, found)):,} of {len(images.labels):,} images", end="", flush=True)
    print()
    return torch.cat(found)


def main() -> None:
    """Read the arguments, compute the features, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="a dataset such as PACS, or a folder domain/class/*.jpg")
    parser.add_argument("out", type=Path, help="the .npz file to write")
    parser.add_argument("--network", default="resnet50.tv_in1k", help="a network of timm")
    parser.add_argument("--weights", default="pretrained", help="a file, or pretrained: timm's")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()

    images = load_dataset(given.images, given.data_dir)
    if not isinstance(images, ImageDataset):
        parser.error(f"{given.images} is not a dataset of images")
    features = features_of(images, given.network, given.weights, given.device)
    sizes = torch.tensor(images.bounds).diff()
    np.savez(
        given.out,
        inputs=features.numpy(),
        domain=np.repeat(images.environments, sizes),
        **{"class": np.array(images.classes)[images.labels]},
    )
    print(f"{given.out}: {features.shape[1]} features of {len(features):,} images in {len(sizes)} domains")


if __name__ == "__main__":
    main()
