"""The main program of the command line: the greeting, global options, and error reports."""

import errno
import importlib
import importlib.util
import inspect
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from sandmask._files import naming
from sandmask._signals import TERMINATED, exit_status
from sandmask._text import printable, printable_lines
from sandmask._torchrun import OtherProcessError, first_to_say
from sandmask._version import __version__
from sandmask.cli._console import styled
from sandmask.errors import SandmaskError
from sandmask.plugins import plugin_failure
from sandmask.registry import near

STANDARD_OUTPUT_NAME = Path("standard output")  # in messages
RUN, READ, LOOK = "Run", "Read results", "Look things up"


@dataclass(frozen=True)
class Command:
    """A subcommand: its line in the help, and its module.

    The module holds either `app`, a `typer.Typer` with subcommands of its own, or a function named like the module,
    which is the command.
    """

    name: str
    summary: str
    panel: str
    module: str

    @property
    def exists(self) -> bool:
        """Whether its package is installed. The package is not imported."""
        return importlib.util.find_spec(self.module.rpartition(".")[0]) is not None

    def load(self) -> Any:
        """The command itself."""
        module = importlib.import_module(self.module)
        parent = typer.Typer(add_completion=False, rich_markup_mode="rich")
        parent.callback()(lambda: None)  # with a callback, typer builds a group even around a single command
        if hasattr(module, "app"):
            parent.add_typer(module.app, name=self.name)
        else:
            parent.command(self.name)(getattr(module, self.module.rpartition(".")[2]))
        group: Any = get_command(parent)
        return group.commands[self.name]


def readable(command: Any, ctx: Any) -> Any:
    """Join the lines of each paragraph of a command's help, because typer keeps the line breaks of the docstring.

    Flags get no metavar.
    """
    if command.help:
        paragraphs = inspect.cleandoc(command.help).split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for option in command.get_params(ctx):
        if option.metavar is None and getattr(option, "is_flag", False):
            option.metavar = ""
    for each in getattr(command, "commands", {}).values():
        readable(each, ctx)
    return command


COMMANDS = (
    Command("demo", "A small sweep on generated data, with a table and a picture", RUN, "sandmask.cli.demo"),
    Command("train", "Train one model with one or more environments held out", RUN, "sandmask.cli.train"),
    Command(
        "sweep", "Train many runs: algorithms x datasets x held-out environments x draws", RUN, "sandmask.cli.sweep"
    ),
    Command("soup", "Combine the models of a sweep: weight averages and ensembles", RUN, "sandmask.cli.soup"),
    Command("predict", "Classify images or arrays with a trained model", RUN, "sandmask.cli.predict"),
    Command("export", "Export a trained model for PyTorch (torch.export) or as ONNX", RUN, "sandmask.cli.export"),
    Command("report", "Tables and pages from the records of a sweep", READ, "sandmask.cli.report"),
    Command("paper", "Reproduce the paper's figures and tables next to its numbers", READ, "sandmask.paper.commands"),
    Command("import-domainbed", "Read the results of a DomainBed sweep", READ, "sandmask.cli.import_domainbed"),
    Command("list", "List algorithms, datasets, selection rules, metrics and networks", LOOK, "sandmask.cli.list_"),
    Command(
        "hparams", "Show the hyperparameters of an algorithm on a dataset, for any seed", LOOK, "sandmask.cli.hparams"
    ),
    Command("data", "Download, verify and find datasets", LOOK, "sandmask.cli.data"),
    Command("doctor", "Check this installation", LOOK, "sandmask.cli.doctor"),
)


def _interrupted(_: int, frame: FrameType | None) -> None:
    """On Ctrl-C, exit at once while torch is imported, and raise `KeyboardInterrupt` at any other time.

    Torch swallows exceptions while it imports numpy: the program would continue with half of numpy. Nothing needs to be
    cleaned up by then.
    """
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            os.write(2, b"\ninterrupted\n")
            os._exit(128 + signal.SIGINT)
        frame = frame.f_back
    raise KeyboardInterrupt


# Typer's class for an invalid command line, which is in different modules in different versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# The greeting: a title, and lines to copy with what each is for.
FIRST = (
    ("Try it", {"sandmask demo": "a few minutes on generated data: a table and a picture"}),
    (
        "Use a mask in your own loop, instead of loss.backward()",
        {"sandmask.backward(losses, model.named_parameters(), sandmask.SANDMask(tau=0.8))": ""},
    ),
    (
        "Train and compare",
        {
            "sandmask train Spirals ANDMask --test-env 5": "one run",
            "sandmask sweep run --datasets Spirals --algorithms ERM,ANDMask --test-envs 5 --n-hparams 2": "12 runs",
            "sandmask report runs --html report.html --open": "compare them",
        },
    ),
)
MORE = {"sandmask --help": "all commands", "sandmask doctor": "check the installation"}


class LazyGroup(TyperGroup):
    """Lists the commands, imports only the one that is run, and reports user errors in one line."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.table = {command.name: command for command in COMMANDS if command.exists}
        for name, each in self.table.items():
            self.add_command(TyperCommand(name, help=each.summary, rich_help_panel=each.panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Import the command to run."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, readable(self.table[name].load(), ctx) if name in self.table else command, rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help of the whole program."""
        readable(self, ctx)
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the global options."""
        with _one_line():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. User errors print one line on standard error and exit with status 2."""
        with _one_line():
            return super().invoke(ctx)


@contextmanager
def _one_line() -> Iterator[None]:
    """Print user errors in one line; bugs keep their traceback."""
    try:
        yield
    except KeyboardInterrupt as error:
        status = exit_status(error)
        _say("\nterminated" if status == TERMINATED else "\ninterrupted")
        raise typer.Exit(status) from None
    except Exception as error:
        said = _described(error)
        if said is None:
            raise
        if said:
            _say(f"error: {said}")
        raise typer.Exit(2) from None


def _described(error: Exception) -> str | None:
    """Describe a user error. Return "" if another process or a help page has described it, and None for a bug."""
    if isinstance(error, OtherProcessError):
        return ""
    if isinstance(error, SandmaskError):
        return printable_lines(str(error))
    if isinstance(error, _UsageError):
        return printable(_explained(error))
    if isinstance(error, OSError):
        if error.strerror is None or error.errno == errno.EPIPE:  # typer handles a closed pipe
            return None
        where = f"{printable(str(error.filename))}: " if error.filename is not None else _nameless(error)
        said = "this is a file, not a folder" if isinstance(error, FileExistsError) else error.strerror
        return f"{where}{said}."
    return plugin_failure(error)


def _say(text: str) -> None:
    """Print a line on standard error. Several processes of torchrun print it once."""
    if first_to_say(text):
        typer.echo(text, err=True)


def _nameless(error: OSError) -> str:
    """The subject of an error that names no file: the current folder, if it was deleted."""
    if isinstance(error, FileNotFoundError):
        try:
            Path.cwd()
        except FileNotFoundError:
            return "the current folder: "
    return ""


def _explained(error: Any) -> str:
    """Describe an error in a command line, and name its help; "" for a group alone, which prints its help."""
    said = _no_such_option(error) or " ".join(error.format_message().split())
    if not said:
        return ""
    said += "" if said.endswith((".", "?", "!")) else "."
    if error.ctx is None:
        return said
    commands = getattr(error.ctx.command, "commands", {})
    if said.startswith("No such command") and "Did you mean" not in said:
        return f"{said} Choose from: {', '.join(commands)}."
    return f"{said} See: {error.ctx.command_path} --help"


def _no_such_option(error: Any) -> str:
    """Describe an unknown option and suggest a similar one; "" for other errors.

    Typer's own suggestions include options that have only the hyphens in common.
    """
    if not hasattr(error, "option_name") or not hasattr(error, "possibilities"):
        return ""
    known = [name for option in error.ctx.command.get_params(error.ctx) for name in option.opts] if error.ctx else []
    meant = near(error.option_name, [name for name in known if name.startswith("--")])
    return f"No such option: {error.option_name}." + (f" Did you mean {meant}?" if meant else "")


app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="See the help of a command for examples: [bold]sandmask train --help[/bold]",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sandmask {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def frame(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001 - acted on by its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train models that must work on domains they have not seen, and compare methods for this."""
    if ctx.invoked_subcommand is None:
        typer.echo(greeting())


def greeting() -> str:
    """The first commands to try."""
    lines = [f"{styled('sandmask', bold=True)} {__version__}: models that work on domains they have not seen"]
    for number, (what, ways) in enumerate(FIRST, start=1):
        width = max(map(len, ways))
        lines += ["", f" {styled(str(number), bold=True)}  {what}"]
        lines += [f"      {_to_copy(line, note, width)}" for line, note in ways.items()]
    return "\n".join([*lines, "", *(f" {_to_copy(line, note)}" for line, note in MORE.items())])


def _to_copy(line: str, note: str, width: int = 0) -> str:
    """A line to copy, with a note on its purpose."""
    if not note:
        return styled(line, fg="cyan")
    return f"{styled(f'{line:<{width}}', fg='cyan')}   {styled(note, dim=True)}"


class _StandardOutput(io.TextIOWrapper):
    """Standard output. It is named in errors of writing, for example if it is redirected to a file on a full disk."""

    def write(self, text: str) -> int:
        """Write text."""
        with naming(STANDARD_OUTPUT_NAME):
            return super().write(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with naming(STANDARD_OUTPUT_NAME):
            super().flush()


def run() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in a process that ignores SIGINT
        signal.signal(signal.SIGINT, _interrupted)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the parent process has closed it
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - as long as the program
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # characters that the terminal's encoding lacks are not an error
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
        lines, through = out.line_buffering, out.write_through
        sys.stdout = _StandardOutput(out.buffer, out.encoding, out.errors, line_buffering=lines, write_through=through)
    if os.environ.get("COLUMNS") == "0":  # some programs set it if the width is unknown; tables would be empty
        del os.environ["COLUMNS"]
    app(prog_name="sandmask")
