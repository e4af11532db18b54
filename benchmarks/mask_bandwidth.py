"""Bandwidth of the mask of ResNet-50's gradients on a GPU, as a share of a device-to-device copy in the same run."""

import torch

from benchmarks._measure import alternate, print_rows
from sandmask import ANDMask, SANDMask

PARAMETERS = 25_557_032  # ResNet-50's
REPEATS = 30


def measure(envs: int) -> list[tuple[str, ...]]:
    grads = torch.randn(envs, PARAMETERS, device="cuda")
    target = torch.empty_like(grads)
    masks = {"SAND-mask": SANDMask(tau=0.5), "AND-mask": ANDMask(tau=1.0)}
    actions = {name: (lambda mask=mask: mask(grads, check_finite=False)) for name, mask in masks.items()}
    times = alternate({"copy": lambda: target.copy_(grads), **actions}, REPEATS, warmup=5, calls=10)
    copy_rate = 2 * 4 * grads.numel() / times["copy"]
    moved = (envs + 1) * PARAMETERS * 4
    return [
        (
            str(envs),
            name,
            f"{1e3 * times[name]:.3f}",
            f"{moved / times[name] / 1e12:.2f}",
            f"{copy_rate / 1e12:.2f}",
            f"{moved / times[name] / copy_rate:.0%}",
        )
        for name in masks
    ]


def main() -> None:
    if not torch.cuda.is_available():
        print("mask_bandwidth: needs a CUDA device; skipped.")
        return
    rows: list[tuple[str, ...]] = [("environments", "mask", "ms", "TB/s", "copy TB/s", "share of the copy's rate")]
    for envs in (3, 16):
        rows += measure(envs)
    print_rows("Mask of ResNet-50's gradients: bytes moved, (E + 1) x P x 4, over time (DomainBed: 40.6 ms)", rows)


if __name__ == "__main__":
    main()
