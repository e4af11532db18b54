"""`sandmask predict`: classify files with a trained model."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sandmask._text import printable
from sandmask.cli._console import counted, print_json, print_table
from sandmask.cli._options import JsonOption, PluginOption
from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from sandmask.cli._examples import Example
    from sandmask.training import TrainedRun

FILES_AT_ONCE = 64

Prediction = dict[str, Any]


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a trained run, or its model.safetensors.")],
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Images; arrays, as .npy, .npz or .csv; or folders, with all in them."),
    ],
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Show the K likeliest classes.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; the GPU if there is one.")] = None,
    json: JsonOption = False,
    plugin: PluginOption = None,
) -> None:
    """Classify files with a trained model. The dataset is not needed.

    Images of any size and format are resized and normalized as in training. A file of arrays holds one example, or one
    per row. Of a folder, all images in it and its subfolders are classified (for models of arrays, all arrays).
    Files that cannot be used are named, the others are classified, and the exit status is 2. ARM and MTL treat all
    files as examples of one environment.

    [bold]Examples[/bold]

    sandmask predict runs/pacs photo.jpg drawing.png --top 3

    sandmask predict runs/pacs/model.safetensors photos/ --json

    sandmask predict runs/spirals points.csv --json
    """
    from sandmask.plugins import load_plugins
    from sandmask.training import choose_device, load_run

    load_plugins(plugin)
    trained = load_run(run, choose_device(device))
    failures: list[str] = []
    predictions = [
        prediction
        for examples in _batches(trained, list(_expanded(trained, files, failures)), failures)
        for prediction in _predict(trained, examples, top)
    ]
    if json:
        print_json(predictions)
    elif predictions:
        _print(predictions)
    for failure in failures:
        typer.echo(f"error: {printable(failure)}", err=True)
    if failures:
        raise typer.Exit(2)


def _expanded(run: "TrainedRun", files: Sequence[Path], failures: list[str]) -> Iterator[Path]:
    """The files, and in place of folders what the model takes of the files in them."""
    from sandmask.cli._examples import ARRAYS
    from sandmask.datasets._scan import SUFFIXES
    from sandmask.datasets._walk import list_files

    endings = SUFFIXES if run.info.preprocessing.kind == "image" else ARRAYS
    for path in files:
        if not path.is_dir():
            yield path
            continue
        found = list_files(path).files
        taken = [name for name in found if name.lower().endswith(endings)]
        if not taken:
            failures.append(f"{path} holds no files of type {', '.join(endings)}.")
        elif len(taken) < len(found):
            others = counted(len(found) - len(taken), "file")
            typer.echo(f"note: left out {others} of other types in {printable(str(path))}", err=True)
        yield from (path / name for name in taken)


def _batches(run: "TrainedRun", files: Sequence[Path], failures: list[str]) -> Iterator[list["Example"]]:
    """The files' examples, some files at a time; all at once for a method that looks at the whole batch."""
    from sandmask.cli._examples import read_examples

    def read(path: Path) -> list["Example"] | SandmaskError:
        try:
            return read_examples(run, path)
        except SandmaskError as error:
            return error

    everything: list[Example] = []
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for begin in range(0, len(files), FILES_AT_ONCE):
            found: list[Example] = []
            for result in pool.map(read, files[begin : begin + FILES_AT_ONCE]):
                if isinstance(result, SandmaskError):
                    failures.append(str(result))
                else:
                    found += result
            if run.uses_context:
                everything += found
            elif found:
                yield found
    if everything:
        yield everything


def _predict(run: "TrainedRun", examples: list["Example"], top: int) -> Iterator[Prediction]:
    import torch

    probabilities = run.predict(torch.stack([example.x for example in examples]))
    values, numbers = probabilities.topk(min(top, len(run.classes)))
    for example, shares, classes in zip(examples, values.tolist(), numbers.tolist(), strict=True):
        ranked = [
            {"class": run.classes[number], "probability": share} for number, share in zip(classes, shares, strict=True)
        ]
        row = {} if example.row is None else {"row": example.row}
        yield {"file": example.file, **row, **ranked[0], "top": ranked}


def _print(predictions: list[Prediction]) -> None:
    rows = []
    for prediction in predictions:
        name = prediction["file"] + (f"[{prediction['row']}]" if "row" in prediction else "")
        for rank, each in enumerate(prediction["top"]):
            rows.append(("" if rank else name, each["class"], f"{each['probability']:.1%}"))
    print_table("", ("file", "class", "probability"), rows)
