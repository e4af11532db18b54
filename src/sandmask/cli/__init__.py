"""The command line, one file per subcommand; `main` is the console script.

A subcommand is a line in `_app.COMMANDS` and a module with a typer function. Only the command that is run is imported,
so that `sandmask --help` is fast.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """The console script."""
    try:
        from sandmask.cli._app import run
    except KeyboardInterrupt:  # while the app is imported; afterwards it handles interrupts itself
        sys.stderr.write("\ninterrupted\n")
        sys.exit(130)
    run()
