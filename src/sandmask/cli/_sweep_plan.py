"""Print a plan."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sandmask.api._sweep_progress import duration
from sandmask.cli._console import counted, print_table

if TYPE_CHECKING:
    from sandmask.sweeps import Plan, StackEstimate

LONGEST = 40  # rows of the table


def size(n_bytes: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "kB", "MB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.0f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} GB"


def print_plan(plan: "Plan", folder: Path) -> None:
    """The stacks in order, then what they take."""
    grouped: defaultdict[tuple[str, ...], list[StackEstimate]] = defaultdict(list)
    for each in plan.stacks:
        first = each.stack.specs[0]
        grouped[first.dataset, first.algorithm, each.shape].append(each)
    rows = []
    for key, stacks in list(grouped.items())[:LONGEST]:
        runs = [len(each.stack.specs) for each in stacks]
        seconds = [each.seconds for each in stacks if each.seconds is not None]
        took = duration(sum(seconds)) if seconds else "-"
        rows.append((*key, str(sum(runs)), str(len(stacks)), took, size(max(each.memory_bytes for each in stacks))))
    if rows:
        print_table(
            "Stacks, in the order of training",
            ("dataset", "algorithm", "shape", "runs", "stacks", "time", "memory of one"),
            rows,
        )
    if len(grouped) > LONGEST:
        typer.echo(f"and {len(grouped) - LONGEST} more shapes (--json lists them all)")
    for note in plan.notes:
        typer.echo(f"note: {note}")
    missing = plan.runs - plan.done
    all_runs, all_stacks = counted(plan.runs, "run"), counted(len(plan.stacks), "stack")
    typer.echo(f"{all_runs}: {plan.done} done, {missing} missing, in {all_stacks}.")
    if missing:
        took = "not measured" if plan.seconds is None else f"about {duration(plan.seconds)}"
        at_once = f", {plan.workers} stacks at a time" if plan.workers > 1 else ""
        typer.echo(f"Time: {took}{at_once}. Memory: {size(plan.memory_bytes)}. Disk: {size(plan.disk_bytes)}.")
    else:
        typer.echo(f"Nothing to do. Tables: sandmask report {folder}")


def plan_json(plan: "Plan") -> dict[str, Any]:
    """Everything, for scripts."""
    stacks = [
        {
            "stack": each.stack.id,
            "dataset": each.stack.specs[0].dataset,
            "algorithm": each.stack.specs[0].algorithm,
            "shape": each.shape,
            "runs": [spec.id for spec in each.stack.specs],
            "seconds": each.seconds,
            "memory_bytes": round(each.memory_bytes),
            "disk_bytes": round(each.disk_bytes),
        }
        for each in plan.stacks
    ]
    return {
        "runs": plan.runs,
        "done": plan.done,
        "missing": plan.runs - plan.done,
        "seconds": plan.seconds,
        "memory_bytes": round(plan.memory_bytes),
        "disk_bytes": round(plan.disk_bytes),
        "workers": plan.workers,
        "notes": list(plan.notes),
        "stacks": stacks,
    }
