"""A step on all cores while another program uses one: threads wait as libgomp lets them, or as in the command line."""

import os
import subprocess
import sys

import torch
from torch.nn import functional as F

from benchmarks._measure import alternate, print_rows
from benchmarks.mask_step_cpu import ENVS, mlp
from sandmask.cli import SPINS

WAITING = {"libgomp's default": None, "the command line's": SPINS}  # GOMP_SPINCOUNT
REPEATS = 40


def measure(batch_size: int) -> float:
    """Milliseconds of a plain step of the Spirals MLP, in this process."""
    model, x = mlp(), torch.randn(ENVS * batch_size, 18)
    y = torch.randint(0, 2, (len(x),))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return 1e3 * alternate({"step": step}, REPEATS)["step"]


def milliseconds(batch_size: int, spins: str | None) -> float:
    """`measure` in a process of its own, which reads the setting when it starts."""
    others = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    own = {} if spins is None else {"GOMP_SPINCOUNT": spins}
    command = [sys.executable, "-m", "benchmarks.busy_cpu", str(batch_size)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=others | own).stdout)


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        print(measure(int(sys.argv[1])))
        return
    rows: list[tuple[str, ...]] = [("batch per environment", "waiting", "alone, ms", "beside another program, ms")]
    for batch_size in (512, 64, 8):
        for name, spins in WAITING.items():
            alone = milliseconds(batch_size, spins)
            with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
                try:
                    beside = milliseconds(batch_size, spins)
                finally:
                    other.kill()
            rows.append((str(batch_size), name, f"{alone:.1f}", f"{beside:.1f}"))
    print_rows("Spirals MLP, 16 environments: an ERM step while another program uses a core", rows)


if __name__ == "__main__":
    main()
