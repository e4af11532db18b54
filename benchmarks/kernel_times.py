"""Profile the steps of a stack on a GPU: microseconds of every kernel per run-step.

python -m benchmarks.kernel_times spirals SANDMask 256 fp32x3
python -m benchmarks.kernel_times spirals ERM 16 fp32x3 mlp_width=833 mlp_depth=4 batch_size=358
python -m benchmarks.kernel_times convnet IGA 16 bf16

As in `stacked`, Spirals has an evaluation every 10 steps, and the ConvNet has none.
"""

import sys
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks._measure import print_rows
from benchmarks.stacked import Runs, digits
from sandmask.datasets import load_dataset
from sandmask.training.malloc import freed_memory_kept

HPARAMS = {"spirals": {"batch_size": 128.0, "mlp_width": 256.0}, "convnet": {"batch_size": 64.0}}
ROUNDS, SHOWN = 2, 30


def times(runs: Runs) -> dict[str, list[float]]:
    """Return the microseconds of every launch, by the name of the kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(ROUNDS):
            runs.round()
        torch.cuda.synchronize()
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for event in found.events() or ():
        if event.device_type.name == "CUDA":
            by_name[event.name].append(event.time_range.elapsed_us())
    return by_name


def main() -> None:
    if not torch.cuda.is_available():
        print("kernel_times: needs a CUDA device; skipped.")
        return
    where, algorithm, size, precision, *settings = sys.argv[1:] or ["spirals", "SANDMask", "256", "fp32x3"]
    chosen = {name: float(value) for name, value in (setting.split("=") for setting in settings)}
    dataset = load_dataset("Spirals") if where == "spirals" else digits()
    evaluate = where == "spirals"
    runs = Runs(dataset, algorithm, int(size), {**HPARAMS[where], **chosen}, precision, evaluate=evaluate)
    rate = runs.rate()
    found = times(runs)
    steps = ROUNDS * runs.every
    rows: list[tuple[str, ...]] = [("kernel", "microseconds per run-step", "launches per step")]
    for name, taken in sorted(found.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        rows.append((name[:90], f"{sum(taken) / steps / int(size):.3f}", f"{len(taken) / steps:.1f}"))
    total = sum(map(sum, found.values())) / steps / int(size)
    title = f"{dataset.name}, {algorithm}, stack of {size}, {precision}: {rate:,.0f} run-steps per second"
    print_rows(f"{title}; {total:.3f} microseconds per run-step in all kernels", rows)


if __name__ == "__main__":
    with freed_memory_kept():
        main()
