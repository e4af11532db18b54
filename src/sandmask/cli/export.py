"""`sandmask export`: a trained model for other programs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sandmask.cli import _options
from sandmask.cli._console import STANDARD_OUTPUT
from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from sandmask.training import TrainedRun


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a trained run, or a sweep.")],
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="torch-export|onnx",
            help="Format of the file. (default: from the suffix of --output, else torch-export)",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File to write. (default: RUN/model.pt2, or .onnx; RUN/stacks/ID.pt2 of a sweep)"
        ),
    ] = None,
    hub: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a folder in the layout of the Hugging Face Hub instead.")
    ] = None,
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload a folder in this layout.")] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: make a new repository private.")] = False,
    run_id: _options.RunOption = None,
    average: _options.KindOption = None,
    plugin: _options.PluginOption = None,
) -> None:
    """Export a trained model for PyTorch without sandmask (torch.export), as ONNX, or for the Hugging Face Hub.

    The exported model maps a batch of preprocessed examples, of any size, to logits. Its metadata hold the class names
    and the preprocessing. The exported model is compared with the run before the file is written.

    For the Hub, a folder with config.json, model.safetensors and a model card is written (--hub) or uploaded (--push).
    Other people load it with sandmask.load_run("hf:OWNER/NAME").

    [bold]Examples[/bold]

    sandmask export runs/first

    sandmask export runs/first --format onnx --output classifier.onnx

    sandmask export runs/first --hub my-model
    """
    from sandmask.plugins import load_plugins
    from sandmask.training import load_run
    from sandmask.training.exporting import export_run

    if output == STANDARD_OUTPUT:
        raise SandmaskError("A model cannot be written to standard output. Name a file: --output model.pt2")
    if private and push is None:
        raise SandmaskError("--private is for --push OWNER/NAME, which uploads the model.")
    load_plugins(plugin)
    trained = load_run(run, run=run_id, average=average)
    if hub is not None or push is not None:
        _to_hub(trained, run, hub, push, private=private)
        return
    exported = export_run(trained, format_name, output)
    shape = ", ".join(map(str, trained.input_shape))
    typer.echo(
        f"Wrote {exported.path}: [N, {shape}] -> logits [N, {len(trained.classes)}]. "
        f"Checked against the run: largest difference {exported.difference:.1e}."
    )
    if trained.uses_context:
        typer.echo(f"{trained.spec.algorithm} treats each batch as examples of one environment.")


def _to_hub(trained: "TrainedRun", run: Path, folder: Path | None, repository: str | None, *, private: bool) -> None:
    """Write the folder, upload it, or both. For a run of a sweep, the card also has the sweep's accuracy."""
    from sandmask.records import read_runs
    from sandmask.sweeps import SweepFolder

    runs = read_runs(run) if run.is_dir() and SweepFolder(run).request.exists() else ()
    if folder is not None:
        path = trained.save_pretrained(folder, runs=runs)
        typer.echo(f"Wrote {path}: {', '.join(sorted(file.name for file in path.iterdir()))}.")
    if repository is not None:
        typer.echo(f"Uploaded to {trained.push_to_hub(repository, runs=runs, private=private)}")
