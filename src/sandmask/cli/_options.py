"""Options that several commands share, so that they read the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
PluginOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="A Python file that registers algorithms or datasets of your own. Repeatable; the variable "
        "SANDMASK_PLUGINS names more.",
    ),
]
HparamOption = Annotated[
    list[str] | None,
    typer.Option("--hparam", metavar="NAME=VALUE", help="Set a hyperparameter by hand. Repeatable."),
]
SpaceOption = Annotated[
    str,
    typer.Option("--space", metavar="paper|domainbed", help="Whose ranges random draws come from."),
]
HparamsSeedOption = Annotated[int, typer.Option("--hparams-seed", min=0, help="Which random draw; 0 is the defaults.")]
TrialSeedOption = Annotated[
    int, typer.Option("--trial-seed", min=0, help="Which repetition: decides the draw and the data splits.")
]
