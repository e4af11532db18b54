"""Options that several commands share, so that they read the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

from sandmask.cli import _completion

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
    typer.Option(
        "--space",
        metavar="NAME",
        help="Where defaults and random draws come from: recipe (settings that work), paper or domainbed.",
        autocompletion=_completion.words("recipe", "paper", "domainbed"),
    ),
]
HparamsSeedOption = Annotated[
    int, typer.Option("--hparams-seed", metavar="N", min=0, help="Which random draw; 0 is the defaults.")
]
TrialSeedOption = Annotated[
    int,
    typer.Option("--trial-seed", metavar="N", min=0, help="Which repetition: decides the draw and the data splits."),
]
SeedOption = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, help="Initial weights, minibatches, all else that is random.")
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", metavar="N", min=1, help="Training steps; the dataset's protocol if not given.")
]
CheckpointEveryOption = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every",
        metavar="N",
        min=1,
        help="Evaluate every so many steps; the dataset's protocol if not given.",
    ),
]
NetworkOption = Annotated[
    str | None, typer.Option("--network", help="mlp, mnist-convnet or a timm name; the dataset's own if not given.")
]
WeightsOption = Annotated[
    str | None,
    typer.Option("--weights", metavar="FILE|none", help="Pretrained weights for a timm network, or none of them."),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="What is computed in: fp32, tf32, bf16, or fp16 (for gradient masks on the MLP). "
        "In all but fp32, runs may generalize a little worse.",
        autocompletion=_completion.words("fp32", "tf32", "bf16", "fp16"),
    ),
]
AverageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--average",
        metavar="NAME",
        help="Also evaluate averaged weights: sma (uniform mean), ema (exponential), swad. Repeatable, or with commas.",
        autocompletion=_completion.words("sma", "ema", "swad"),
    ),
]
FastOption = Annotated[
    bool, typer.Option("--fast/--no-fast", help="Whether a GPU's program may be captured as a graph.")
]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Compile the network: a slow start, faster steps. For timm networks.")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 ...; the GPU if there is one.")]
DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Where the datasets are; see: sandmask data where")
]
SkipCorruptOption = Annotated[bool, typer.Option("--skip-corrupt", help="Leave out images that cannot be read.")]
MissingClassesOption = Annotated[
    bool, typer.Option("--missing-classes", help="Let a domain of images lack classes that others have.")
]
CheckpointSecondsOption = Annotated[
    float, typer.Option("--checkpoint-seconds", metavar="N", min=0, help="Save the state this often, for a resume.")
]
DiagnosticsOption = Annotated[
    bool,
    typer.Option(
        "--diagnostics",
        help="Also record what a mask does to each tensor, and the agreement of held-out gradients. Changes no number.",
    ),
]
TensorBoardOption = Annotated[
    Path | None,
    typer.Option("--tensorboard", metavar="DIR", help="Also write losses, accuracies and diagnostics for TensorBoard."),
]


def listed(values: list[str] | None) -> tuple[str, ...]:
    """The words of an option that may be repeated, or have several words with commas between."""
    words = [word.strip() for value in values or () for word in value.split(",")]
    return tuple(word for word in words if word)


def allowances(*, skip_corrupt: bool, allow_missing_classes: bool) -> tuple[str, ...]:
    """What a dataset of images is to put up with, as its loader names it; other datasets know none of it."""
    given = {"skip_corrupt": skip_corrupt, "allow_missing_classes": allow_missing_classes}
    return tuple(name for name, wanted in given.items() if wanted)
