"""`sandmask export`: a trained model for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from sandmask.cli._console import STANDARD_OUTPUT
from sandmask.cli._options import PluginOption
from sandmask.errors import SandmaskError


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a trained run.")],
    format_name: Annotated[
        str, typer.Option("--format", metavar="torch-export|onnx", help="What kind of file to write.")
    ] = "torch-export",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="RUN/model.pt2 or RUN/model.onnx if not given.")
    ] = None,
    plugin: PluginOption = None,
) -> None:
    """Save a trained model for PyTorch without sandmask (torch.export) or for any ONNX runtime.

    The exported model takes preprocessed examples, as many at a time as you like, and gives logits. Class names
    and preprocessing are in its metadata. The file is checked against the run before it takes its name.

    [bold]Examples[/bold]

    sandmask export runs/first

    sandmask export runs/first --format onnx --output classifier.onnx
    """
    from sandmask.plugins import load_plugins
    from sandmask.training import load_run
    from sandmask.training.exporting import export_run

    if output == STANDARD_OUTPUT:
        raise SandmaskError("A model is read back to check it, which takes a file. Name one: --output model.pt2")
    load_plugins(plugin)
    trained = load_run(run)
    exported = export_run(trained, format_name, output)
    shape = ", ".join(map(str, trained.input_shape))
    typer.echo(
        f"Wrote {exported.path}: [N, {shape}] -> logits [N, {len(trained.classes)}]. "
        f"Checked against the run: largest difference {exported.difference:.1e}."
    )
    if trained.uses_context:
        typer.echo(f"{trained.spec.algorithm} takes each batch for examples of one environment.")
