"""Cost of a mask if all environments share a forward pass: an MLP and a transformer, 16 environments, on the CPU.

`recorded` uses `sandmask.record`. `a list of losses` needs a backward pass through the shared graph for each loss.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._measure import Action, alternate, print_rows
from benchmarks.mask_step_cpu import ENVS, mlp
from sandmask import SANDMask, backward, record

MASK = SANDMask(tau=0.8)
WORDS, LENGTH, WIDTH = 1000, 32, 128  # of the transformer


class Transformer(nn.Module):
    """Two layers of attention over sentences of 32 words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """The logits of sentences [N, 32]."""
        logits: Tensor = self.head(self.layers(self.words(ids) + self.places(torch.arange(LENGTH)[None])).mean(1))
        return logits


def split_losses(logits: Tensor, y: Tensor) -> list[Tensor]:
    return [F.cross_entropy(rows, of) for rows, of in zip(logits.chunk(ENVS), y, strict=True)]


def erm(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x.flatten(0, 1)), y.flatten()).backward()  # type: ignore[no-untyped-call]


def recorded(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with record(model, [y.shape[1]] * ENVS) as recording:
        logits = model(x.flatten(0, 1))
    recording.backward(split_losses(logits, y), MASK)


def shared(model: nn.Module, x: Tensor, y: Tensor) -> None:
    backward(split_losses(model(x.flatten(0, 1)), y), model.named_parameters(), MASK)


def generated(model: nn.Module, x: Tensor, y: Tensor) -> None:
    backward((F.cross_entropy(model(a), b) for a, b in zip(x, y, strict=True)), model.named_parameters(), MASK)


WAYS = {
    "ERM": erm,
    "recorded": recorded,
    "a list of losses": shared,
    "separate passes, a generator": generated,
}


def measure(build: Callable[[], nn.Module], x: Tensor, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    y = torch.randint(0, 2, x.shape[:2])

    def step(way: Callable[[nn.Module, Tensor, Tensor], None]) -> Action:
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def act() -> None:
            optimizer.zero_grad()
            way(model, x, y)
            optimizer.step()

        return act

    return alternate({name: step(way) for name, way in WAYS.items()}, repeats)


def table(title: str, build: Callable[[], nn.Module], draw: Callable[[int], Tensor], sizes: Mapping[int, int]) -> None:
    """Print a table.

    :param sizes: numbers of readings, by the batch size per environment.
    """
    rows: list[tuple[str, ...]] = [("batch per environment", *(f"{name}, ms" for name in WAYS), "recorded over ERM")]
    for batch_size, repeats in sizes.items():
        times = measure(build, draw(batch_size), repeats)
        ratio = f"{times['recorded'] / times['ERM']:.2f}"
        rows.append((str(batch_size), *(f"{1e3 * times[name]:.1f}" for name in WAYS), ratio))
    print_rows(f"{title}, 16 environments that share a forward pass: SAND-mask step over ERM step", rows)


def main() -> None:
    table("Spirals MLP", mlp, lambda n: torch.randn(ENVS, n, 18), {512: 5, 256: 10, 64: 30})
    table("Transformer", Transformer, lambda n: torch.randint(WORDS, (ENVS, n, LENGTH)), {32: 3, 8: 10})


if __name__ == "__main__":
    main()
