"""Time from the command to the first training step, for a small model on the CPU."""

import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks._measure import print_rows

REPEATS = 5
COMMAND = (
    "-m",
    "sandmask",
    "train",
    "Spirals",
    "SANDMask",
    "--test-env",
    "0",
    "--hparam",
    "tau=0.5",
    "--device",
    "cpu",
)


def seconds(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    times: dict[str, list[float]] = {"import torch": [], "one step": [], "--help": []}
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            times["one step"].append(seconds(*COMMAND, "--steps", "1", "--out", folder))
        times["import torch"].append(seconds("-c", "import torch"))
        times["--help"].append(seconds("-m", "sandmask", "--help"))
    head = ("what", "seconds", "DomainBed's script")
    rows = [
        (name, f"{statistics.median(values):.2f}", "11" if name == "one step" else "") for name, values in times.items()
    ]
    print_rows("Starting a run: import, data, first step, evaluation, records, model", [head, *rows])


if __name__ == "__main__":
    main()
