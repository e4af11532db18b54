"""`sandmask demo`: a small sweep on the built-in Spirals data, in a few minutes on a laptop."""

import os
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sandmask.cli._console import print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sandmask.datasets import Dataset
    from sandmask.datasets.spirals_figure import SpiralPanel
    from sandmask.records import RunRecord, RunSpec
    from sandmask.selection import Selected
    from sandmask.sweeps import Expansion, SweepFolder

METHODS = ("ERM", "ANDMask", "SANDMask")
TITLES = {"ERM": "ERM", "ANDMask": "AND-mask", "SANDMask": "SAND-mask"}
# A draw of the data that had no part in choosing the settings: those were tried on other seeds.
# Environment 0 is the one in which no shortcut works: a model that relies on one is at chance there.
DATASET, HELD_OUT = "Spirals:seed=3", "0"
DRAWS, STEPS, EVERY = 3, 701, 50
# A smaller network than the recipe's, with a larger learning rate and fewer steps: two minutes on two cores.
FIXED = {"mlp_width": 128, "lr": 0.01}
WORKERS = 4  # runs at a time, at most, and no more than there are cores
RULE = "training-domain"


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder for the records and the picture; runs/demo-DATE-TIME if not given.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Training steps.")] = STEPS,
) -> None:
    """Compare ERM, AND-mask and SAND-mask on Spirals: a small sweep, a table, a picture.

    In Spirals, two interleaved spirals carry the label in every domain. Each domain also has a shortcut of its own,
    which is easier to learn and worthless elsewhere. Held out is the one domain without a shortcut. Each method trains
    with three hyperparameter draws of the recipe, and the best one is chosen on the training domains alone. If the
    demo is stopped, the same --out resumes it.

    [bold]Examples[/bold]

    sandmask demo

    sandmask demo --steps 1001 --out runs/longer
    """
    from sandmask.sweeps import SweepFolder, SweepSpec, expand, normalized

    out = out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"  # noqa: DTZ005 - the user's own clock
    start = time.monotonic()
    sweep = normalized(
        SweepSpec(
            datasets=(DATASET,),
            algorithms=METHODS,
            test_envs=(HELD_OUT,),
            n_hparams=DRAWS,
            n_trials=1,
            steps=steps,
            checkpoint_every=EVERY,
            hparams=FIXED,
        )
    )
    folder, expansion = SweepFolder(out.absolute()), expand(sweep)
    folder.accept(sweep)
    typer.echo(
        f"Spirals, trained on 16 domains, the one without a shortcut held out: {len(METHODS)} methods x {DRAWS} "
        f"hyperparameter draws = {len(expansion.runs)} runs of {steps} steps."
    )
    _train(folder, expansion, out)
    _show(folder, out / "demo.png")
    typer.echo(f"{time.monotonic() - start:.0f} seconds; all tables: sandmask report {out}")


def _train(folder: "SweepFolder", expansion: "Expansion", out: Path) -> None:
    """Train what is missing, and keep the weights that it ends with: the picture needs some of them."""
    from sandmask.api._sweep_progress import SweepDisplay, headline
    from sandmask.sweeps import JobOptions, run_sweep, sweep_status
    from sandmask.sweeps.executors import EXECUTORS, ExecutorOptions

    # One core for each run: small products do not fill two, and threads that wait for each other cost more.
    workers = ExecutorOptions(workers=min(WORKERS, os.cpu_count() or 1), devices=("cpu",))
    look = partial(sweep_status, folder, expansion.runs)
    with SweepDisplay(look) as display:
        try:
            options = JobOptions(str(folder.path), device="cpu", states=True)
            run_sweep(folder, expansion, options, lambda: EXECUTORS["local"].build(workers), _cap, display.say)
        except KeyboardInterrupt:
            display.say(f"stopped; {headline(look())}. To continue: sandmask demo --out {out}")
            raise typer.Exit(130) from None


def _cap(_: "Sequence[RunSpec]") -> int:
    """Every run alone, so that all cores finish at about the same time."""
    return 1


def _show(folder: "SweepFolder", picture: Path) -> None:
    """Print the table and draw the picture of the runs that training-domain validation chooses."""
    from sandmask.records import read_runs
    from sandmask.selection import RULES, select

    runs = read_runs(folder.path)
    chosen = {m: select(RULES[RULE], [run for run in runs if run.spec.algorithm == m], int(HELD_OUT)) for m in METHODS}
    found = {method: best for method, best in chosen.items() if best is not None}  # None: every run diverged
    rows = [(TITLES[m], f"{100 * best.validation:.1f}", f"{100 * best.test_accuracy:.1f}") for m, best in found.items()]
    print_table("Accuracy in percent", ("method", "training domains", "unseen domain"), rows)
    typer.echo(
        "Each run was chosen by its accuracy on held-back examples of the training domains. The unseen domain had no "
        "part in this."
    )
    _draw(folder, found, picture)


def _draw(folder: "SweepFolder", chosen: "dict[str, Selected]", path: Path) -> None:
    """The plane of the spiral as each chosen run sees it after its last step."""
    from sandmask.datasets import load_dataset
    from sandmask.datasets.spirals_figure import draw_spirals

    dataset = load_dataset(DATASET)
    panels = [_panel(folder, method, best.run, dataset) for method, best in chosen.items()]
    try:
        draw_spirals([panel for panel in panels if panel is not None], dataset, path)
    except ImportError:
        typer.echo("No picture was drawn, because matplotlib is missing. Run: pip install 'sandmask[report]'")
    else:
        typer.echo(f"picture: {path}")


def _panel(folder: "SweepFolder", method: str, run: "RunRecord", dataset: "Dataset") -> "SpiralPanel | None":
    from sandmask.datasets.spirals_figure import spiral_panel
    from sandmask.training.checkpoint import load_checked
    from sandmask.training.stack import build_algorithm

    accuracy = float(run.accuracy_in[-1, int(HELD_OUT)])
    for path in folder.stacks.glob("*.state.safetensors"):
        metadata, leaves = load_checked(path)
        if run.spec.id in metadata["runs"]:
            params = leaves["state.params"][metadata["runs"].index(run.spec.id)]
            algorithm = build_algorithm(run.spec, dataset, weights=None, dropout=False)
            predict = partial(algorithm.predict, {"params": params})
            return spiral_panel(TITLES[method], predict, dataset.input_shape[0], accuracy)
    return None
