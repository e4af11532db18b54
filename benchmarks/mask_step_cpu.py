"""Cost of a SAND-mask step relative to an ERM step: the Spirals MLP, 16 environments, on the CPU."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._measure import alternate, print_rows
from sandmask import SANDMask, environment_moments, set_gradients

ENVS, WIDTH = 16, 256


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(18, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, 2),
    )


def measure(batch_size: int, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    x, y = torch.randn(ENVS, batch_size, 18), torch.randint(0, 2, (ENVS, batch_size))
    erm_model, sand_model = mlp(), mlp()
    erm_optimizer = torch.optim.Adam(erm_model.parameters(), lr=1e-3)
    sand_optimizer = torch.optim.Adam(sand_model.parameters(), lr=1e-3)
    mask = SANDMask(tau=0.8)
    batches: list[tuple[Tensor, Tensor]] = list(zip(x, y, strict=True))

    def erm() -> None:
        erm_optimizer.zero_grad()
        F.cross_entropy(erm_model(x.flatten(0, 1)), y.flatten()).backward()  # type: ignore[no-untyped-call]
        erm_optimizer.step()

    def sand() -> None:
        sand_optimizer.zero_grad()
        moments = environment_moments(sand_model, F.cross_entropy, batches)
        set_gradients(sand_model.named_parameters(), mask, moments)
        sand_optimizer.step()

    return alternate({"ERM": erm, "SAND": sand}, repeats)


def main() -> None:
    rows: list[tuple[str, ...]] = [("batch per environment", "ERM ms", "SAND-mask ms", "ratio", "DomainBed's ratio")]
    for batch_size, repeats, elsewhere in ((512, 30, "2.2"), (64, 100, "4.2")):
        times = measure(batch_size, repeats)
        ratio = times["SAND"] / times["ERM"]
        ms = [f"{1e3 * times[name]:.1f}" for name in ("ERM", "SAND")]
        rows.append((str(batch_size), *ms, f"{ratio:.2f}", elsewhere))
    print_rows("Spirals MLP (width 256, depth 3), 16 environments: SAND-mask step over ERM step", rows)


if __name__ == "__main__":
    main()
