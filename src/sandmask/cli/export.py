"""`sandmask export`: a trained model for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from sandmask.cli._console import STANDARD_OUTPUT
from sandmask.cli._options import KindOption, PluginOption, RunOption
from sandmask.errors import SandmaskError


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a trained run, or a sweep.")],
    format_name: Annotated[
        str, typer.Option("--format", metavar="torch-export|onnx", help="Format of the file.")
    ] = "torch-export",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: RUN/model.pt2 or RUN/model.onnx")
    ] = None,
    run_id: RunOption = None,
    average: KindOption = None,
    plugin: PluginOption = None,
) -> None:
    """Export a trained model for PyTorch without sandmask (torch.export), or as ONNX.

    The exported model maps a batch of preprocessed examples, of any size, to logits. Its metadata hold the class names
    and the preprocessing. The exported model is compared with the run before the file is written.

    [bold]Examples[/bold]

    sandmask export runs/first

    sandmask export runs/first --format onnx --output classifier.onnx
    """
    from sandmask.plugins import load_plugins
    from sandmask.training import load_run
    from sandmask.training.exporting import export_run

    if output == STANDARD_OUTPUT:
        raise SandmaskError("A model cannot be written to standard output. Name a file: --output model.pt2")
    load_plugins(plugin)
    trained = load_run(run, run=run_id, average=average)
    exported = export_run(trained, format_name, output)
    shape = ", ".join(map(str, trained.input_shape))
    typer.echo(
        f"Wrote {exported.path}: [N, {shape}] -> logits [N, {len(trained.classes)}]. "
        f"Checked against the run: largest difference {exported.difference:.1e}."
    )
    if trained.uses_context:
        typer.echo(f"{trained.spec.algorithm} treats each batch as examples of one environment.")
