"""The frame of the command line: the greeting, global options, and what happens when something goes wrong."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sandmask._version import __version__
from sandmask.cli._commands import COMMANDS
from sandmask.errors import SandmaskError

GREETING: tuple[tuple[str | None, str, str], ...] = (
    ("train", "Train one model, PACS's sketches held out", "sandmask train PACS SANDMask --test-env S"),
    (
        "sweep",
        "Compare methods over seeds and draws",
        "sandmask sweep Spirals ERM ANDMask SANDMask --out runs",
    ),
    ("report", "  and see the tables", "sandmask report runs"),
    (
        None,
        "Use the masks in your own loop",
        "sandmask.backward(losses, model.parameters(), SANDMask(tau=0.8))",
    ),
)


class LazyGroup(TyperGroup):
    """Lists the table of commands, imports only the one that is run, and reports mistakes in one line."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.table = {command.name: command for command in COMMANDS if command.exists}
        for name, command in self.table.items():
            self.add_command(command.stub(), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """The command to run: the real one in place of its line in the list."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.table[name].load() if name in self.table else command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run; a user's mistake ends in one line on standard error and exit status 2."""
        try:
            return super().invoke(ctx)
        except SandmaskError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("\ninterrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Each command explains itself, with examples: [bold]sandmask train --help[/bold]",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sandmask {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def frame(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001 - acted on by its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Train models that must work on domains they have not seen, and compare the methods that promise it."""
    if ctx.invoked_subcommand is None:
        typer.echo(greeting())


def greeting() -> str:
    """The things people do first, as far as their commands are installed."""
    present = {command.name for command in COMMANDS if command.exists}
    lines = [f"sandmask {__version__}: models that work on domains they have not seen", ""]
    for command, what, how in GREETING:
        if command is None or command in present:
            lines.append(f"  {what + ':':44}{how}")
    return "\n".join([*lines, "", "All commands: sandmask --help"])


def main() -> None:
    """The console script."""
    app(prog_name="sandmask")
