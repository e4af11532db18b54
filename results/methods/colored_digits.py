"""ColoredDigits, a dataset plugin: ColoredMNIST as in the paper of IRM (Arjovsky et al., 2019), for an MLP on a CPU.

The digits, labels and colours are those of ColoredMNIST. Every second row and column is kept, so that an image has
2 x 14 x 14 values.
"""

from pathlib import Path

from sandmask.datasets import DATASETS, DatasetEntry, TensorDataset
from sandmask.datasets.mnist import COLORED_MNIST, load_colored

NAME = "ColoredDigits"


def load(data_dir: Path | None = None) -> TensorDataset:
    """The three environments of ColoredMNIST, at half the resolution."""
    full = load_colored(data_dir)
    images = full.stored[:, :, ::2, ::2].contiguous()
    parts = [(images[a:b], full.labels[a:b]) for a, b in zip(full.bounds, full.bounds[1:], strict=False)]
    return TensorDataset(NAME, full.environments, full.classes, parts)


DATASETS.register(
    DatasetEntry(
        name=NAME,
        description="ColoredMNIST with 14 x 14 pixels, for an MLP",
        environments=COLORED_MNIST.environments,
        load=load,
        network="mlp",
        scope="tabular",
        steps=501,
        checkpoint_every=50,
        n_classes=2,
        input_shape=(2, 14, 14),
    )
)
