"""A network and a dataset of your own, in one file: a small transformer that reads opinions from four shops.

    sandmask train Opinions ERM --test-env phones --plugin examples/plugins/tiny_transformer.py
    sandmask sweep run runs/opinions --datasets Opinions --algorithms ERM,ANDMask,VREx --test-envs phones \
        --n-hparams 4 --n-trials 1 --plugin examples/plugins/tiny_transformer.py

An opinion is a sentence of twelve words. The words "good" and "bad", and a "not" before them, give the label. The brand
that is named agrees with the label in three shops and contradicts it in the fourth. A tenth of the labels are wrong, so
90% is the best that can be achieved without the brand.

The network is an ordinary `nn.Module`. It is checked when it is first used: that examples do not depend on each other,
that it is not random, and whether runs of it can be stacked. This one can: a sweep trains its runs as one program.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from sandmask.datasets import DATASETS, DatasetEntry, TensorDataset
from sandmask.networks import NETWORKS, NetworkEntry

SENTIMENT, BRANDS = ("bad", "good", "not"), ("acme", "zenith")
OTHERS = ("the", "a", "it", "was", "is", "and", "of", "my", "this", "very", "screen", "page", "room", "story")
WORDS = (*SENTIMENT, *BRANDS, *OTHERS)  # an index each
NOT, FIRST_BRAND, FIRST_OTHER = 2, len(SENTIMENT), len(SENTIMENT + BRANDS)
LENGTH = 12
EXAMPLES = 400  # of each shop
MISTAKES = 0.1  # share of the labels that are wrong
SHOPS = {"books": 0.95, "films": 0.9, "hotels": 0.85, "phones": 0.1}  # how often the brand goes with the opinion


def opinions(seed: int, brand_agrees: float) -> tuple[Tensor, Tensor]:
    """Sentences [n, LENGTH] as numbers of words, and whether they are favourable [n]."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (EXAMPLES,), generator=draws)
    negated = torch.randint(0, 2, (EXAMPLES,), generator=draws)
    agrees = (torch.rand(EXAMPLES, generator=draws) < brand_agrees).long()
    words = torch.randint(FIRST_OTHER, len(WORDS), (EXAMPLES, LENGTH), generator=draws)
    rows = torch.arange(EXAMPLES)
    place = torch.randint(1, LENGTH // 2, (EXAMPLES,), generator=draws)
    words[rows, place] = torch.where(negated == 1, 1 - labels, labels)  # "bad" or "good"
    words[rows, place - 1] = torch.where(negated == 1, NOT, words[rows, place - 1])  # "not"
    brand = torch.randint(LENGTH // 2, LENGTH, (EXAMPLES,), generator=draws)
    mistaken = torch.rand(EXAMPLES, generator=draws) < MISTAKES
    labels = torch.where(mistaken, 1 - labels, labels)
    words[rows, brand] = FIRST_BRAND + torch.where(agrees == 1, labels, 1 - labels)
    return words.float(), labels  # inputs are float32; the network turns them into indices


def load(data_dir: Path | None = None) -> TensorDataset:  # noqa: ARG001 - generated
    """The opinions of the four shops."""
    parts = [opinions(seed, agrees) for seed, agrees in enumerate(SHOPS.values())]
    return TensorDataset("Opinions", tuple(SHOPS), ("unfavourable", "favourable"), parts)


class TinyTransformer(nn.Module):
    """Words [N, LENGTH] to features [N, width]: two layers of attention, and the mean over the sentence."""

    def __init__(self, length: int, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=2 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        read: Tensor = self.layers(self.words(x.long()) + self.places)
        return read.mean(1)


def build(input_shape: tuple[int, ...]) -> nn.Module:
    """The network for sentences of this length."""
    return TinyTransformer(input_shape[0])


NETWORKS.register(NetworkEntry(name="tiny-transformer", summary="Two layers of attention over words", build=build))
DATASETS.register(
    DatasetEntry(
        name="Opinions",
        description="Favourable or not, from four shops; the brand misleads in one",
        environments=tuple(SHOPS),
        load=load,
        network="tiny-transformer",
        scope="small-image",  # whose hyperparameters: learning rate 0.001, batches of 64
        steps=601,
        checkpoint_every=100,
        report_envs=(3,),
        n_classes=2,
        input_shape=(LENGTH,),
    )
)
