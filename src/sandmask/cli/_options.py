"""Options that several commands share, and their conversion to arguments of the API."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sandmask.cli import _completion
from sandmask.hparams import SPACES, parse_overrides
from sandmask.records import AVERAGES, MEASURES


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a command as arguments of the function that it calls, which have the same names.

    Options that were not given are left out.
    """
    named = {name: value for name, value in given.items() if value is not None and name != "json"}
    return {**named, "hparams": parse_overrides(named["hparams"])} if "hparams" in named else named


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
PluginOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="Python file that registers your own algorithms, datasets, networks or selection rules. Repeatable. The "
        "variable SANDMASK_PLUGINS names more files.",
    ),
]
HparamOption = Annotated[
    list[str] | None,
    typer.Option("--hparam", metavar="NAME=VALUE", help="Set the value of a hyperparameter. Repeatable."),
]
SpaceOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Defaults and ranges of hyperparameters: recipe (settings that work), paper or domainbed.",
        autocompletion=_completion.words(*SPACES),
    ),
]
HparamsSeedOption = Annotated[int, typer.Option(metavar="N", min=0, help="Hyperparameter draw; 0 is the defaults.")]
TrialSeedOption = Annotated[
    int, typer.Option(metavar="N", min=0, help="Repetition; changes the draw and the data splits.")
]
SeedOption = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of weights, minibatches and other randomness.")]
StepsOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Training steps. (default: from the dataset)")
]
CheckpointEveryOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Evaluate every N steps. (default: from the dataset)")
]
NetworkOption = Annotated[
    str | None, typer.Option(help="mlp, mnist-convnet, your own or a timm name. (default: from the dataset)")
]
WeightsOption = Annotated[
    str | None,
    typer.Option(metavar="FILE|none", help="Pretrained weights of a timm network, or none. (default: timm's own)"),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Compute precision: fp32, fp32x3 (float32 on tensor cores), tf32, bf16, or fp16 "
        "(gradient masks on the MLP only). Below fp32, runs may generalize slightly worse.",
        autocompletion=_completion.words("fp32", "fp32x3", "tf32", "bf16", "fp16"),
    ),
]
AverageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--average",
        metavar="NAME",
        help="Also evaluate averaged weights: sma (uniform mean), ema (exponential), swad. Repeatable, or with commas.",
        autocompletion=_completion.words(*AVERAGES),
    ),
]
MetricsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="A,B",
        help="Also record f1 (macro-F1), ece (calibration error), worst-group, per-class (accuracy), confusion, or "
        "all. Results do not change.",
        autocompletion=_completion.words(*MEASURES, "all"),
    ),
]
TrainEvalOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Compute accuracy on at most N training examples per environment; all validation and held-out examples "
        "are evaluated. Makes evaluations faster. (default: all)",
    ),
]
RunOption = Annotated[
    str | None, typer.Option("--run", metavar="ID", help="The run, if RUN is a sweep; see: sandmask sweep models")
]
KindOption = Annotated[
    str | None,
    typer.Option(
        "--average",
        metavar="NAME",
        help="Use averaged weights that the run kept: sma, ema or swad.",
        autocompletion=_completion.words(*AVERAGES),
    ),
]
FastOption = Annotated[bool, typer.Option(help="Use CUDA graphs on a GPU.")]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Compile the network: slower start, faster steps. For timm networks.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... (default: a GPU if present)")]
DataDirOption = Annotated[Path | None, typer.Option(help="Folder of the datasets; see: sandmask data where")]
SkipCorruptOption = Annotated[bool, typer.Option("--skip-corrupt", help="Skip images that cannot be read.")]
MissingClassesOption = Annotated[
    bool, typer.Option("--missing-classes", help="Allow image domains that lack some of the classes.")
]
CheckpointSecondsOption = Annotated[float, typer.Option(metavar="N", min=0, help="Save a checkpoint every N seconds.")]
DiagnosticsOption = Annotated[
    bool,
    typer.Option(
        "--diagnostics",
        help="Also record statistics of the mask, and the agreement of gradients on validation examples.",
    ),
]
LogOption = Annotated[
    list[str] | None,
    typer.Option(metavar="LOGGER", help="Also log to tensorboard:DIR, wandb:PROJECT or mlflow:DIR. Repeatable."),
]
TensorBoardOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Also write losses, accuracies and diagnostics for TensorBoard.")
]
