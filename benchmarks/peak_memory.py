"""Peak memory of a SAND-mask step relative to an ERM step: ResNet-18, 32 images per environment, on a GPU."""

from collections.abc import Callable

import timm
import torch
from torch import nn
from torch.nn import functional as F

import sandmask
from benchmarks._measure import print_rows

BATCH = 32


def peak(step: Callable[[], object]) -> float:
    """Measure peak bytes of the second step. The first one allocates the optimizer's state."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def resnet18() -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = timm.create_model("resnet18", num_classes=7)
    model = model.to("cuda")
    sandmask.freeze_batchnorm(model)
    return model, torch.optim.Adam(model.parameters(), lr=5e-5)


def measure(envs: int, *, same_batch: bool) -> tuple[float, float]:
    """Measure peaks of ERM and SAND-mask. With `same_batch`, ERM gets the images of one environment only."""
    x = torch.randn(envs, BATCH, 3, 224, 224, device="cuda")
    y = torch.randint(0, 7, (envs, BATCH), device="cuda")

    def erm_peak() -> float:
        model, optimizer = resnet18()
        inputs, labels = (x[0], y[0]) if same_batch else (x.flatten(0, 1), y.flatten())

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return peak(step)

    def sand_peak() -> float:
        model, optimizer = resnet18()

        def step() -> None:
            optimizer.zero_grad()
            losses = (F.cross_entropy(model(x[e]), y[e]) for e in range(envs))
            sandmask.backward(losses, model.parameters(), sandmask.SANDMask(tau=0.5))
            optimizer.step()

        return peak(step)

    data = x.numel() * 4 + y.numel() * 8
    return erm_peak() - data, sand_peak() - data


def main() -> None:
    if not torch.cuda.is_available():
        print("peak_memory: needs a CUDA device; skipped.")
        return
    head = ("environments", "ERM sees", "ERM MiB", "SAND-mask MiB", "ratio")
    rows: list[tuple[str, ...]] = [head]
    for envs in (2, 4, 16):
        for same_batch, sees in ((False, "all environments' images at once"), (True, "32 images")):
            erm, sand = measure(envs, same_batch=same_batch)
            rows.append((str(envs), sees, f"{erm / 2**20:.0f}", f"{sand / 2**20:.0f}", f"{sand / erm:.2f}"))
    print_rows("ResNet-18, 32 images an environment, float32: peak memory of a step, the images themselves aside", rows)


if __name__ == "__main__":
    main()
