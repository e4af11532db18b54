"""`sandmask soup`: combine the models of a sweep."""

from collections import Counter
from typing import Annotated

import typer

import sandmask
from sandmask._text import counted, in_shell
from sandmask.cli import _completion, _options
from sandmask.cli._console import plain_rows, print_json, print_table
from sandmask.cli._sweep_request import DEFAULT_FOLDER, Folder
from sandmask.records import AVERAGES
from sandmask.selection import ADAPTATIONS, spoken_soup

_NOUNS = {"ensemble": "ensemble", **dict.fromkeys(ADAPTATIONS, "adapted model")}  # other kinds are soups


def soup(
    folder: Folder = DEFAULT_FOLDER,
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="A,B",
            help="uniform (mean of the weights of all runs), greedy (mean of runs that help on validation data), "
            "ensemble (mean of logits); t3a, unidg (the best model, adapted to test examples). (default: first three)",
            autocompletion=_completion.words("uniform", "greedy", "ensemble", *ADAPTATIONS),
        ),
    ] = None,
    of: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B",
            help="What to combine: weights, or averages that the sweep kept: sma, ema, swad. (default: all)",
            autocompletion=_completion.words("weights", *AVERAGES),
        ),
    ] = None,
    device: _options.DeviceOption = None,
    data_dir: _options.DataDirOption = None,
    skip_corrupt: _options.SkipCorruptOption = False,
    allow_missing_classes: _options.MissingClassesOption = False,
    json: _options.JsonOption = False,
    plugins: _options.PluginOption = None,
) -> None:
    """Combine the models of all draws of a sweep, for each method, held-out environment and trial.

    Train the sweep with --keep-models best (or last). Means of weights also need --shared-init. Members
    are chosen on the validation data of the training environments. The results are in DIR/soups, and sandmask report
    shows them as separate methods, such as ERM + greedy soup.

    With --kind t3a, no models are combined: the classifier of the best model adapts to the unlabelled examples on which
    it is evaluated (T3A). With --kind unidg, its network also adapts (UniDG). Other methods do not see these examples.

    [bold]Examples[/bold]

    sandmask sweep run runs/pacs --datasets PACS --algorithms ERM --keep-models best --shared-init

    sandmask soup runs/pacs

    sandmask soup runs/pacs --kind ensemble --of sma

    sandmask soup runs/pacs --kind t3a,unidg
    """
    found = sandmask.soup(**_options.arguments(locals()), progress=False if json else "lines")
    if json:
        print_json(plain_rows(found))
        return
    rows = [
        (
            row["dataset"],
            " + ".join(filter(None, (row["algorithm"], (row["average"] or "").upper(), spoken_soup(row["soup"])))),
            row["test_env"],
            str(row["trial_seed"]),
            f"{row['members']} of {row['candidates']}",
            f"{row['validation']:.1%}",
            f"{row['held_out']:.1%}",
        )
        for row in plain_rows(found)
    ]
    header = ("dataset", "method", "held out", "trial", "members", "validation", "held-out accuracy")
    counts = Counter(_NOUNS.get(kind, "soup") for kind in found["soup"])
    print_table(", ".join(counted(number, noun) for noun, number in counts.items()), header, rows)
    typer.echo(f"Tables: sandmask report {in_shell(folder)}")
