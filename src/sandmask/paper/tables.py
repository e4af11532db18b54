"""Tables 1, 2 and 3 and the table of PACS from records, next to the printed numbers."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from sandmask.datasets import DATASETS
from sandmask.errors import SandmaskError
from sandmask.paper._compare import RULES, Compared, averages_grid, cell_rows, compare, environments_grid
from sandmask.paper._printed import AVERAGE, datasets
from sandmask.paper._product import Product
from sandmask.records import RunRecord, read_runs

_RULE_WORDS = {"training-domain": "training-domain validation set", "oracle": "test-domain validation set (oracle)"}


def read_all(paths: Sequence[Path]) -> list[RunRecord]:
    """Read the runs of several folders or archives. A run that is in several of them is returned once."""
    runs = {run.spec.id: run for path in paths for run in read_runs(path)}
    return list(runs.values())


def as_protocol(runs: Sequence[RunRecord], dataset: str) -> list[RunRecord]:
    """Return the runs on a dataset with the network that the paper used for it, without those of Figure 2."""
    network = DATASETS[dataset].network
    mine = [run for run in runs if run.spec.dataset == dataset and run.spec.network == network]
    return [run for run in mine if "noise" not in run.spec.options]


def is_untrained(run: RunRecord) -> bool:
    """Whether the network of a run cannot have been trained: the SAND-mask with tau = 1 is zero everywhere."""
    return run.spec.algorithm.startswith("SANDMask") and run.spec.hparams.get("tau", 0.0) >= 1.0


def _untrained_notes(cells: Sequence[Compared]) -> list[str]:
    """Make notes on cells whose selected networks were not trained."""
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
    """Make a note on the precision of each method."""
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
    """Make tables of the averages, then of each dataset's environments under each rule, beside the printed numbers."""
    cells = compare(runs, datasets, rules, draws=draws, trials=trials, comparable=comparable)
    grids = [averages_grid(cells, title, [*notes, _precision_note(runs), *_untrained_notes(cells)])]
    for dataset, rule in dict.fromkeys((cell.dataset, cell.rule) for cell in cells):
        mine = [cell for cell in cells if (cell.dataset, cell.rule) == (dataset, rule)]
        grids.append(environments_grid(mine, f"{dataset}, {_RULE_WORDS.get(rule, rule)}"))
    rows = cell_rows(cells)
    columns = ("selection", "dataset", "method", "ours", "paper", "verdict")
    summary = {
        "averages": [{name: row[name] for name in columns} for row in rows if row["environment"] == AVERAGE],
        "cells": Counter(row["verdict"] for row in rows if row["environment"] != AVERAGE),
    }
    return Product(name, title, data={name: pd.DataFrame(rows)}, grids=tuple(grids), summary=summary)


def _protocol_table(
    number: str,
    title: str,
    rules: Sequence[str],
    runs: Sequence[RunRecord],
    *,
    draws: int | None = 20,
    trials: int | None = 3,
) -> Product:
    """Make a table of the paper from the runs with the paper's network."""
    names = datasets(number)
    mine = [run for name in names for run in as_protocol(runs, name)]
    return table_product(f"table-{number}", f"Table {number}: {title}", mine, names, rules, draws=draws, trials=trials)


table_1 = partial(_protocol_table, "1", "training-domain validation", ["training-domain"])
table_2 = partial(_protocol_table, "2", "test-domain validation (oracle)", ["oracle"])
table_3 = partial(_protocol_table, "3", "Spirals", RULES)  # with the sixteen environments of the appendix


def table_pacs(runs: Sequence[RunRecord], *, draws: int | None = None, trials: int | None = None) -> Product:
    """Make a table of the PACS runs with other networks than the paper's. Its numbers are only a rough comparison."""
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
    counts = {"draws": draws, "trials": trials}
    return table_product(
        "table-pacs", "PACS with another network", mine, ["PACS"], RULES, **counts, notes=(note,), comparable=False
    )


@dataclass(frozen=True)
class PaperTable:
    """A table: the function that makes it from records, its title, and the sweeps in results/paper that it needs."""

    make: Callable[..., Product]
    title: str
    configs: tuple[str, ...]

    def needs_records(self) -> SandmaskError:
        """Return the error for missing records, which shows the commands that make them."""
        commands = [f"    sandmask sweep run runs/{name} --config results/paper/{name}.toml" for name in self.configs]
        given = " ".join(f"--records runs/{name}" for name in self.configs)
        return SandmaskError(
            "\n".join([f"{self.title} is made from the records of a sweep. Make them with", *commands])
            + f"\nand give them to this command: {given}"
        )


TABLES = {
    "table-1": PaperTable(table_1, "Table 1", ("colored_mnist", "rotated_mnist")),
    "table-2": PaperTable(table_2, "Table 2", ("colored_mnist", "rotated_mnist")),
    "table-3": PaperTable(table_3, "Table 3", ("spirals",)),
    "table-pacs": PaperTable(table_pacs, "The table of PACS", ("pacs",)),
}
