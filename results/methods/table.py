"""The tables of all methods, from the records beside this file: `python results/methods/table.py` writes table.md.

`sandmask.paper.pages` copies its sections into the documentation.
"""

from pathlib import Path

from sandmask import report
from sandmask.reports import Cell, Table

HERE = Path(__file__).parent
SETS = {"mnist": "ColoredMNIST", "spirals": "Spirals", "pacs": "PACS"}


def number(cell: Cell | None) -> str:
    """`72.1 ± 0.2`: mean and standard error over trials; `*` where runs are missing."""
    if cell is None or cell.mean is None:
        return "-"
    error = "" if cell.error is None else f" ± {cell.error:.1f}"
    return f"{cell.mean:.1f}{error}{'*' if cell.have < cell.expected else ''}"


def rows(by_validation: Table, by_oracle: Table) -> list[str]:
    """The best method by training-domain validation first; many environments are shown by their mean alone."""
    environments = by_validation.columns if len(by_validation.columns) <= 6 else ()
    means = by_validation.averages
    methods = sorted(by_validation.methods, key=lambda method: -(means[method].mean or 0.0))
    titles = ["method", *environments, "mean", "mean, oracle"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for method in methods:
        cells = [by_validation.cells.get((method, name)) for name in environments]
        cells += [means[method], by_oracle.averages.get(method)]
        lines.append(f"| {method} | {' | '.join(map(number, cells))} |")
    return lines


def table(archive: Path, dataset: str) -> str:
    """The table of one dataset, in Markdown."""
    found = report(archive, ["training-domain", "oracle"], metrics=[])
    return "\n".join(rows(*(rule.datasets[dataset] for rule in found.rules)))


if __name__ == "__main__":
    archives = {dataset: HERE / f"{name}.records.parquet" for name, dataset in SETS.items()}
    sections = [f"## {dataset}\n\n{table(file, dataset)}\n" for dataset, file in archives.items() if file.is_file()]
    (HERE / "table.md").write_text("\n".join(["# All methods", "", *sections]), encoding="utf-8")
