"""The command line, one file per subcommand; `main` is the console script.

A subcommand is a line in `_app.COMMANDS` and a module with a typer function. Only the command that is run is imported,
so that `sandmask --help` is fast.
"""

import os
import sys

__all__ = ["main"]

SPINS = "3000"
BUSY_LOAD = 0.5  # programs that computed at the same time, on average over the last minute


def main() -> None:
    """The console script."""
    _wait_briefly_if_busy()
    try:
        from sandmask.cli._app import run
    except KeyboardInterrupt:  # while the app is imported; afterwards it handles interrupts itself
        sys.stderr.write("\ninterrupted\n")
        sys.exit(130)
    run()


def _wait_briefly_if_busy() -> None:
    """On a machine with other work, let threads of torch that wait for each other sleep sooner.

    By default they wait in a loop of 300,000 rounds. While another program uses one of the cores, this loop takes most
    of the time of a step (`benchmarks/busy_cpu.py`). libgomp reads the setting when torch is imported.
    """
    busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY_LOAD
    if busy and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
