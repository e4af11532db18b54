"""The table of subcommands: what `sandmask --help` lists, without importing any of them."""

import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

RUN, READ, LOOK = "Run", "Read results", "Look things up"


@dataclass(frozen=True)
class Command:
    """A subcommand: its line in the help, and where it lives.

    The module holds either `app`, a `typer.Typer` with subcommands of its own, or a function named like the module,
    which is the command.
    """

    name: str
    summary: str
    panel: str
    module: str

    @property
    def exists(self) -> bool:
        """Whether the module is installed."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # its package is not there either
            return False

    def stub(self) -> TyperCommand:
        """A placeholder with the name and the summary, for the list of commands."""
        return TyperCommand(self.name, help=self.summary, rich_help_panel=self.panel)

    def load(self) -> Any:
        """The command itself."""
        module = importlib.import_module(self.module)
        parent = typer.Typer(add_completion=False, rich_markup_mode="rich")
        parent.callback()(_nothing)
        if hasattr(module, "app"):
            parent.add_typer(module.app, name=self.name)
        else:
            parent.command(self.name)(getattr(module, self.module.rpartition(".")[2]))
        group: Any = get_command(parent)
        return group.commands[self.name]


def readable(command: Any, ctx: Any) -> Any:
    """The command with help for a narrow terminal: paragraphs flow, and a flag takes no word.

    Left to typer, lines break where the docstring's do, too.
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


def _nothing() -> None:
    """A callback makes typer build a group even around a single command."""


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
