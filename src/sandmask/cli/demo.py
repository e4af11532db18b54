"""`sandmask demo`: a small sweep on the built-in Spirals data, in a few minutes on a laptop."""

import time
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sandmask.cli._console import print_table
from sandmask.cli._sweep_progress import SweepDisplay, headline

if TYPE_CHECKING:
    from sandmask.records import RunRecord
    from sandmask.reports.spirals_figure import SpiralPanel
    from sandmask.sweeps import Expansion, SweepFolder, SweepSpec

METHODS = ("ERM", "IRM", "ANDMask", "SANDMask")
DRAWS, TRIALS, STEPS = 6, 2, 800
SHAPE = {"batch_size": 32, "mlp_width": 64, "mlp_depth": 3}  # fixed, so that a method's runs are one program
RULES_SHOWN = ("training-domain", "oracle")


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder for the records and the picture; runs/demo-DATE-TIME if not given.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = STEPS,
) -> None:
    """Compare ERM, IRM, AND-mask and SAND-mask on Spirals: a small sweep, a table, a picture.

    Spirals has sixteen domains in which a shortcut predicts the label, a different one in each, and one domain without
    any: there, only the spiral does. That domain is held out. Every method gets the same few hyperparameter draws of
    the paper's space; all runs of a method train as one program. Stopped, it goes on with the same --out.

    [bold]Examples[/bold]

    sandmask demo

    sandmask demo --steps 2000 --out runs/longer
    """
    from sandmask.sweeps import SweepFolder, SweepSpec, expand, normalized

    out = out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"  # noqa: DTZ005 - the user's own clock
    start = time.monotonic()
    sweep = normalized(
        SweepSpec(
            datasets=("Spirals",),
            algorithms=METHODS,
            test_envs=("0",),
            n_hparams=DRAWS,
            n_trials=TRIALS,
            steps=steps,
            checkpoint_every=100,
            hparams=SHAPE,
        )
    )
    folder, expansion = SweepFolder(out.absolute()), expand(sweep)
    folder.accept(sweep)
    typer.echo(
        f"Spirals, domain 0 held out, trained on the other 16: {len(METHODS)} methods x {DRAWS} hyperparameter draws x "
        f"{TRIALS} trials = {len(expansion.runs)} runs of {steps} steps, as {len(METHODS)} programs."
    )
    _train(folder, expansion, out)
    _print(folder, sweep)
    _draw(folder, out / "demo.png")
    typer.echo(f"{time.monotonic() - start:.0f} seconds; all tables: sandmask report {out} --against-paper")


def _train(folder: "SweepFolder", expansion: "Expansion", out: Path) -> None:
    """Train what is missing, and keep the weights that it ends with: the picture needs some of them."""
    from sandmask.sweeps import JobOptions, run_sweep, sweep_status
    from sandmask.sweeps.executors import InlineExecutor

    look = partial(sweep_status, folder, expansion.runs)
    with SweepDisplay(look) as display:
        try:
            options = JobOptions(str(folder.path), device="cpu", states=True)
            run_sweep(folder, expansion, options, InlineExecutor, len, display.say)
        except KeyboardInterrupt:
            display.say(f"stopped; {headline(look())}. To go on: sandmask demo --out {out}")
            raise typer.Exit(130) from None


def _print(folder: "SweepFolder", sweep: "SweepSpec") -> None:
    from sandmask.datasets import DATASETS
    from sandmask.records import read_runs
    from sandmask.reports import build_report, cell_text

    report = build_report(read_runs(folder.path), RULES_SHOWN, against_paper=True)
    tables = [rule.datasets["Spirals"] for rule in report.rules]
    rows = [(method, *(cell_text(table.cells[method, "0"]) for table in tables)) for method in METHODS]
    title = "Accuracy on the unseen domain in percent [the paper's, ours minus the paper's]"
    print_table(title, ("method", "chosen on the training domains", "chosen on the unseen domain (oracle)"), rows)
    shape = ", ".join(f"{name} {value}" for name, value in SHAPE.items())
    typer.echo(
        f"A small search, for a first look: the paper has 20 draws (here {DRAWS}), 3 trials ({TRIALS}), "
        f"{DATASETS['Spirals'].steps} steps ({sweep.steps}), 16 held-out domains (1), and draws the shape ({shape})."
    )


def _draw(folder: "SweepFolder", path: Path) -> None:
    """The plane as each method's best run under the oracle sees it after its last step."""
    from sandmask.datasets import load_dataset
    from sandmask.records import read_runs
    from sandmask.reports.spirals_figure import draw_spirals

    dataset = load_dataset("Spirals")
    runs = read_runs(folder.path)
    found = [_panel(folder, [run for run in runs if run.spec.algorithm == method]) for method in METHODS]
    panels = [panel for panel in found if panel is not None]
    try:
        draw_spirals(panels, dataset, path)
    except ImportError:
        typer.echo("No picture: it needs matplotlib. Install it with: pip install 'sandmask[report]'")
    else:
        typer.echo(f"picture (of each method the run that the oracle chooses): {path}")


def _panel(folder: "SweepFolder", runs: "list[RunRecord]") -> "SpiralPanel | None":
    from sandmask.datasets import load_dataset
    from sandmask.reports.spirals_figure import spiral_panel
    from sandmask.selection import RULES, select
    from sandmask.training.checkpoint import load_leaves, load_metadata
    from sandmask.training.stack import build_algorithm

    best = select(RULES["oracle"], runs, 0)
    if best is None:  # every run diverged
        return None
    spec = best.run.spec
    for path in folder.stacks.glob("*.state.safetensors"):
        ids = load_metadata(path)["runs"]
        if spec.id in ids:
            params = load_leaves(path)["state.params"][ids.index(spec.id)]
            algorithm = build_algorithm(spec, load_dataset("Spirals"), weights=None, dropout=False)
            return spiral_panel(spec.algorithm, algorithm, {"params": params}, best.test_accuracy)
    return None
