"""Run every benchmark that this machine supports."""

import importlib

NAMES = (
    "mask_step_cpu",
    "shared_forward_cpu",
    "diagnostics_cost",
    "start_up",
    "busy_cpu",
    "mask_step_gpu",
    "mask_bandwidth",
    "peak_memory",
    "image_step",
    "stacked",
    "fast_path",
)


def main() -> None:
    """Run the benchmarks one after the other. Without a GPU, those that need one print this and do nothing."""
    for name in NAMES:
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
