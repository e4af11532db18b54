"""The command line, one file a subcommand; `main` is the console script.

A subcommand is a line in `_commands.COMMANDS` and a module with a typer function. Only the command that is
run gets imported, so that `sandmask --help` answers at once.
"""

from sandmask.cli._app import main

__all__ = ["main"]
