"""`sandmask predict`: classify files with a trained model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sandmask._text import counted, printable
from sandmask.cli import _options
from sandmask.cli._console import print_json, print_table


def predict(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a trained run, its model.safetensors, or a sweep.")
    ],
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Images, arrays (.npy, .npz or .csv), folders of these, or manifests."),
    ],
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Show the K most likely classes.")] = 1,
    device: _options.DeviceOption = None,
    run_id: _options.RunOption = None,
    average: _options.KindOption = None,
    json: _options.JsonOption = False,
    plugin: _options.PluginOption = None,
) -> None:
    """Classify files with a trained model. The dataset is not needed.

    Images of any size and format are resized and normalized as in training. A file of arrays holds one example, or one
    per row. For a folder, all images in it and its subfolders are classified (for models trained on arrays, all
    arrays). Files that cannot be used are reported and skipped, and the exit status is then 2. ARM and MTL treat all
    files as examples of one environment.

    [bold]Examples[/bold]

    sandmask predict runs/pacs photo.jpg drawing.png --top 3

    sandmask predict runs/pacs/model.safetensors photos/ --json

    sandmask predict runs/spirals points.csv --json

    sandmask predict runs/sweep photo.jpg --run 1a2b3c4d --average sma
    """
    from sandmask.api._predict import predict_files
    from sandmask.plugins import load_plugins
    from sandmask.training import choose_device, load_run

    load_plugins(plugin)
    found = predict_files(load_run(run, choose_device(device), run=run_id, average=average), files, top)
    for folder, count in found.left_out.items():
        typer.echo(f"note: left out {counted(count, 'file')} of other types in {printable(folder)}", err=True)
    if json:
        print_json(found.examples)
    elif found.examples:
        _print(found.examples)
    for failure in found.failures:
        typer.echo(f"error: {printable(failure)}", err=True)
    if found.failures:
        raise typer.Exit(2)


def _print(predictions: list[dict[str, Any]]) -> None:
    rows = []
    for prediction in predictions:
        name = prediction["file"] + (f"[{prediction['row']}]" if "row" in prediction else "")
        for rank, each in enumerate(prediction["top"]):
            rows.append(("" if rank else name, each["class"], f"{each['probability']:.1%}"))
    print_table("", ("file", "class", "probability"), rows)
