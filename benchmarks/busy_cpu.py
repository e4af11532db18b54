"""Time of a step on all cores beside other programs, with libgomp's default waiting and that of the command line."""

import os
import subprocess
import sys
import time

import torch
from torch.nn import functional as F

from benchmarks._measure import print_rows
from benchmarks.mask_step_cpu import ENVS, mlp
from sandmask.cli import SPINS

WAITING = {"libgomp's default": None, "the command line's": SPINS}  # GOMP_SPINCOUNT
SECONDS = 4.0
OTHERS = 3


def measure(batch_size: int) -> float:
    """Measure mean milliseconds of an ERM step of the Spirals MLP in this process. A median would hide stalls."""
    model, x = mlp(), torch.randn(ENVS * batch_size, 18)
    y = torch.randint(0, 2, (len(x),))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(3):  # to warm up
        step()
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        step()
        steps += 1
    return 1e3 * (time.perf_counter() - start) / steps


def milliseconds(batch_size: int, spins: str | None) -> float:
    """Call `measure` in a process of its own, which reads the setting when it starts."""
    others = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    own = {} if spins is None else {"GOMP_SPINCOUNT": spins}
    command = [sys.executable, "-m", "benchmarks.busy_cpu", str(batch_size)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=others | own).stdout)


def beside(count: int, batch_size: int, spins: str | None) -> float:
    """Call `milliseconds` while `count` other programs compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        return milliseconds(batch_size, spins)
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        print(measure(int(sys.argv[1])))
        return
    columns = [f"beside {count}, ms" if count else "alone, ms" for count in range(OTHERS + 1)]
    rows: list[tuple[str, ...]] = [("batch per environment", "waiting", *columns)]
    for batch_size in (512, 64, 8):
        for name, spins in WAITING.items():
            times = [beside(count, batch_size, spins) for count in range(OTHERS + 1)]
            rows.append((str(batch_size), name, *(f"{time:.1f}" for time in times)))
    print_rows("Spirals MLP, 16 environments: an ERM step beside programs that each use a core", rows)


if __name__ == "__main__":
    main()
