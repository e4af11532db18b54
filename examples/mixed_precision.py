"""Mixed precision and gradient accumulation: autocast, a GradScaler, micro-batches, and a mask.

Losses are computed one by one (a generator of generators), so that only one micro-batch's graph exists at a
time, for any number of domains. The scaler is passed to `sandmask.backward`, which unscales gradients before
the mask; everything after it is as in PyTorch's documentation.

    python examples/mixed_precision.py --steps 20                  # bfloat16 on a CPU
    python examples/mixed_precision.py --steps 20 --device cuda    # float16 on a GPU
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import sandmask

MICRO_BATCH = 16


def micro_batch_losses(model: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The mean loss of one domain, in parts: each is divided by their number, because gradients add up."""
    parts = list(zip(torch.split(x, MICRO_BATCH), torch.split(y, MICRO_BATCH), strict=True))
    for part_x, part_y in parts:
        with torch.autocast(x.device.type, dtype=dtype):
            loss = nn.functional.cross_entropy(model(part_x), part_y)
        yield loss / len(parts)


def main() -> None:
    """Train a small convolutional network on generated domains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)  # for so small a model, more threads mostly wait for each other
    dtype = torch.float16 if args.device == "cuda" else torch.bfloat16

    torch.manual_seed(0)
    y = torch.randint(2, (3, 64), device=args.device)
    x = torch.randn(3, 64, 1, 8, 8, device=args.device) + y[..., None, None, None]
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    ).to(args.device)
    for leak in sandmask.find_leaks(model):
        print("leak:", leak)
    sandmask.freeze_batchnorm(model)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = GradScaler(args.device)
    mask = sandmask.SANDMask(tau=0.5)
    for step in range(args.steps):
        optimizer.zero_grad()
        losses = (micro_batch_losses(model, x[e], y[e], dtype) for e in range(len(x)))
        report = sandmask.backward(losses, model.named_parameters(), mask, scaler=scaler)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 5 == 0 or step == args.steps - 1:
            print(f"step {step:>3}: scale {scaler.get_scale():g}, {report.total}")

    with torch.no_grad():
        right = (model(x.flatten(0, 1)).argmax(1) == y.flatten()).float().mean().item()
    print(f"accuracy {right:.1%}")


if __name__ == "__main__":
    main()
