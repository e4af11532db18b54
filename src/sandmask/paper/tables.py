"""Tables 1, 2 and 3 and the table of PACS from records, next to the printed numbers."""

from collections.abc import Sequence
from pathlib import Path

from sandmask.datasets import DATASETS
from sandmask.errors import SandmaskError
from sandmask.paper._compare import RULES, Compared, averages_grid, cells_frame, compare, environments_grid
from sandmask.paper._printed import AVERAGE, printed_cells
from sandmask.paper._product import Product
from sandmask.records import RunRecord, read_runs
from sandmask.reports import Grid

_RULE_WORDS = {"training-domain": "training-domain validation set", "oracle": "test-domain validation set (oracle)"}


def read_all(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs of several stores; a run that is in two of them counts once."""
    runs = {run.spec.id: run for path in paths for run in read_runs(path)}
    return list(runs.values())


def as_protocol(runs: Sequence[RunRecord], dataset: str) -> list[RunRecord]:
    """The runs on a dataset with the network that the paper used for it, without those of Figure 2."""
    network = DATASETS[dataset].network
    mine = [run for run in runs if run.spec.dataset == dataset and run.spec.network == network]
    return [run for run in mine if "noise" not in run.spec.options]


def is_untrained(run: RunRecord) -> bool:
    """Whether no gradient can have reached a run's network: the SAND-mask with tau = 1 is zero everywhere."""
    return run.spec.algorithm.startswith("SANDMask") and run.spec.hparams.get("tau", 0.0) >= 1.0


def _untrained_notes(cells: Sequence[Compared]) -> list[str]:
    """Notes on cells whose selected networks were not trained."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        for trial in cell.ours.trials if cell.environment != AVERAGE else ():
            if trial.selected is not None and is_untrained(trial.selected.run):
                words = f"{cell.environment} ({100 * trial.selected.test_accuracy:.1f})"
                found.setdefault((cell.rule, cell.dataset, cell.method), []).append(words)
    return [
        f"{method} on {dataset}, {rule}: the selected networks are untrained, because the default τ = 1 lets no "
        f"gradient through, with {', '.join(words)} held out."
        for (rule, dataset, method), words in found.items()
    ]


def _precision_note(runs: Sequence[RunRecord]) -> str:
    """A note on the precision of each method."""
    found: dict[str, set[str]] = {}
    for run in runs:
        found.setdefault(run.spec.precision, set()).add(run.spec.algorithm)
    words = [f"{precision} ({', '.join(sorted(names))})" for precision, names in sorted(found.items())]
    return f"Computed in {', '.join(words)}."


def table_product(
    name: str,
    title: str,
    runs: Sequence[RunRecord],
    datasets: Sequence[str],
    rules: Sequence[str],
    *,
    draws: int | None = None,
    trials: int | None = None,
    notes: Sequence[str] = (),
    comparable: bool = True,
) -> Product:
    """The averages, then each dataset's environments under each rule, all beside the printed numbers."""
    present = [dataset for dataset in datasets if any(run.spec.dataset == dataset for run in runs)]
    if not present:
        raise SandmaskError(f"There are no runs on {' or '.join(datasets)} among these records.")
    cells = compare(runs, present, rules, draws=draws, trials=trials, comparable=comparable)
    notes = [*notes, _precision_note(runs), *_untrained_notes(cells)]
    grids = [averages_grid(cells, title, notes), *_appendix(cells)]
    return Product(name, title, data={name: cells_frame(cells)}, grids=tuple(grids), summary=_summary(cells))


def _appendix(cells: Sequence[Compared]) -> list[Grid]:
    groups = dict.fromkeys((cell.dataset, cell.rule) for cell in cells)
    return [
        environments_grid(
            [cell for cell in cells if (cell.dataset, cell.rule) == (dataset, rule)],
            f"{dataset}, {_RULE_WORDS.get(rule, rule)}",
        )
        for dataset, rule in groups
    ]


def _summary(cells: Sequence[Compared]) -> dict[str, object]:
    averages = [
        {
            "selection": cell.rule,
            "dataset": cell.dataset,
            "method": cell.method,
            "ours": cell.ours.mean,
            "paper": None if cell.paper is None else cell.paper.mean,
            "verdict": cell.verdict,
        }
        for cell in cells
        if cell.environment == AVERAGE
    ]
    verdicts = [cell.verdict for cell in cells if cell.environment != AVERAGE]
    return {"averages": averages, "cells": {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}}


def no_records(item: str, configs: Sequence[str]) -> SandmaskError:
    """The error for a table without records."""
    commands = [f"    sandmask sweep run runs/{name} --config results/paper/{name}.toml" for name in configs]
    given = " ".join(f"--records runs/{name}" for name in configs)
    return SandmaskError(
        "\n".join([f"{item} is made from the records of a sweep. Make them with", *commands])
        + f"\nand give them to this command: {given}"
    )


def columns(table: str) -> tuple[str, ...]:
    """The datasets of one of the paper's two main tables, in order."""
    names = dict.fromkeys(cell.dataset for cell in printed_cells() if cell.table == table)
    return tuple(name for name in names if name != AVERAGE)


def table_1(runs: Sequence[RunRecord], *, draws: int | None = 20, trials: int | None = 3) -> Product:
    """The columns that the records have, with the paper's network only, beside the printed ones."""
    names = columns("1")
    mine = [run for name in names for run in as_protocol(runs, name)]
    return table_product(
        "table-1", "Table 1: training-domain validation", mine, names, ["training-domain"], draws=draws, trials=trials
    )


def table_2(runs: Sequence[RunRecord], *, draws: int | None = 20, trials: int | None = 3) -> Product:
    """The columns that the records have, with the paper's network only, beside the printed ones."""
    names = columns("2")
    mine = [run for name in names for run in as_protocol(runs, name)]
    return table_product(
        "table-2", "Table 2: test-domain validation (oracle)", mine, names, ["oracle"], draws=draws, trials=trials
    )


def table_3(runs: Sequence[RunRecord], *, draws: int | None = 20, trials: int | None = 3) -> Product:
    """Averages and the sixteen environments, beside the printed ones."""
    mine = as_protocol(runs, "Spirals")
    return table_product("table-3", "Table 3: Spirals", mine, ["Spirals"], RULES, draws=draws, trials=trials)


def table_pacs(runs: Sequence[RunRecord], *, draws: int | None = None, trials: int | None = None) -> Product:
    """The PACS runs of every network but the paper's; the printed numbers are there for orientation only."""
    protocol = DATASETS["PACS"].network
    mine = [run for run in runs if run.spec.dataset == "PACS" and run.spec.network != protocol]
    if not mine:
        raise SandmaskError(f"There are no runs on PACS with another network than {protocol} among these records.")
    networks = ", ".join(sorted({run.spec.network for run in mine}))
    steps = ", ".join(f"{count:,}" for count in sorted({run.spec.steps for run in mine}))
    note = (
        f"Not the paper's table: {networks} instead of {protocol}, {steps} steps. The paper's numbers (in brackets) "
        "are of another network, and a difference says nothing about the method."
    )
    how = {"draws": draws, "trials": trials}
    return table_product(
        "table-pacs", "PACS with another network", mine, ["PACS"], RULES, **how, notes=(note,), comparable=False
    )
