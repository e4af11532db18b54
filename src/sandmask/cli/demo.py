"""`sandmask demo`: three methods on the built-in Spirals data, in a few minutes on a laptop."""

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sandmask.cli._console import print_table
from sandmask.cli._progress import TrainingBar

if TYPE_CHECKING:
    from sandmask.datasets import Dataset
    from sandmask.reports.spirals_figure import SpiralPanel

SEEDS = 2
SHARED = {"batch_size": 256, "weight_decay": 1e-5}
METHODS = {
    "ERM": {"lr": 0.01},
    "ANDMask-rescaled": {"lr": 0.003, "tau": 1.0},
    "SANDMask": {"lr": 0.003, "tau": 0.7},
}


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder for the records and the picture; runs/demo-DATE-TIME if not given.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 600,
) -> None:
    """Train ERM, AND-mask and SAND-mask on Spirals, print a table, draw a picture.

    Spirals has sixteen domains in which a shortcut predicts the label, a different one in each, and one domain without
    any: there, only the spiral does. That domain is held out of training. An illustration, not a comparison: the
    hyperparameters were picked by accuracy on that very domain, which a fair search must not look at.

    [bold]Examples[/bold]

    sandmask demo

    sandmask demo --steps 1500 --out runs/longer
    """
    from sandmask.datasets import load_dataset
    from sandmask.errors import SandmaskError

    out = out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"  # noqa: DTZ005 - the user's own clock
    if out.exists() and any(out.iterdir()):
        raise SandmaskError(f"{out} is not empty. Choose another folder with --out.")
    start = time.monotonic()
    dataset = load_dataset("Spirals")
    typer.echo(f"Spirals: training on 16 domains, {SEEDS} seeds stacked into one program for each method.")
    rows, panels = [], []
    for method in METHODS:
        row, panel = _train(method, steps, dataset, out)
        rows.append(row)
        panels.append(panel)
    columns = ("method", "on the 16 training domains", "on the unseen domain", f"the {SEEDS} seeds")
    print_table(f"Spirals, after {steps} steps", columns, rows)
    typer.echo("Hyperparameters were picked by accuracy on the unseen domain: an illustration, not a comparison.")
    _draw(panels, dataset, out / "demo.png")
    typer.echo(f"{time.monotonic() - start:.0f} seconds; records in {out}: sandmask report {out}")


def _train(method: str, steps: int, dataset: "Dataset", out: Path) -> tuple[tuple[str, ...], "SpiralPanel"]:
    """Train a method's seeds as one stack; a row of the table, and the picture's panel for the first seed."""
    import torch
    from torch.utils import _pytree as pytree

    from sandmask.datasets import DATASETS
    from sandmask.records import write_archive
    from sandmask.reports.spirals_figure import spiral_panel
    from sandmask.training import Stack, Trainer, make_spec

    hparams = {**SHARED, **METHODS[method]}
    specs = [
        make_spec(
            DATASETS["Spirals"],
            method,
            [0],
            steps=steps,
            checkpoint_every=50,
            hparams=hparams,
            trial_seed=seed,
            seed=seed,
        )
        for seed in range(SEEDS)
    ]
    stack = Stack(specs, dataset, torch.device("cpu"))
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / f"{method.lower()}.safetensors"
    with TrainingBar(specs[0], out) as bar:
        trainer = Trainer(stack, checkpoint, bar.update)
        state = trainer.run()
    runs = trainer.records()
    write_archive(runs, out / f"{method.lower()}.records.parquet")
    checkpoint.unlink()
    unseen = [float(run.accuracy_in[-1, 0]) for run in runs]
    trained = [float(run.accuracy_out[-1, 1:].mean()) for run in runs]
    first = pytree.tree_map(lambda tensor: tensor[0], state)
    row = (
        method,
        f"{sum(trained) / SEEDS:.1%}",
        f"{sum(unseen) / SEEDS:.1%}",
        ", ".join(f"{accuracy:.1%}" for accuracy in unseen),
    )
    return row, spiral_panel(method, stack.algorithm, first, unseen[0])


def _draw(panels: list["SpiralPanel"], dataset: "Dataset", path: Path) -> None:
    from sandmask.reports.spirals_figure import draw_spirals

    try:
        draw_spirals(panels, dataset, path)
    except ImportError:
        typer.echo("No picture: it needs matplotlib. Install it with: pip install 'sandmask[report]'")
    else:
        typer.echo(f"picture: {path}")
