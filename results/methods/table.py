"""The tables of all methods, from the records beside this file: `python results/methods/table.py` writes table.md.

`sandmask.paper.pages` copies its sections into the documentation.
"""

from collections.abc import Sequence
from pathlib import Path

from sandmask import report
from sandmask.reports import Cell, RuleReport, Table

HERE = Path(__file__).parent
RULES = {"training-domain": "", "worst-training-domain": ", worst domain", "oracle": ", oracle"}  # and in column titles
SETS = {
    "cpu": "ColoredDigits",
    "cpu-draws": "ColoredDigits",
    "mnist": "ColoredMNIST",
    "spirals": "Spirals",
    "pacs": "PACS",
    "frozen": "pacs_lite0-08616772",
    "frozen-draws": "pacs_lite0-08616772",
}
TITLES = {
    "cpu": "ColoredDigits: all methods",
    "cpu-draws": "ColoredDigits: eight draws",
    "frozen": "Frozen features of PACS: all methods",
    "frozen-draws": "Frozen features of PACS: eight draws",
}
HARD = "-90%"  # where the colour misleads


def number(cell: Cell | None) -> str:
    """`72.1 ± 0.2`: mean and standard error over trials; `*` where runs are missing."""
    if cell is None or cell.mean is None:
        return "-"
    error = "" if cell.error is None else f" ± {cell.error:.1f}"
    return f"{cell.mean:.1f}{error}{'*' if cell.have < cell.expected else ''}"


def shown_environments(table: Table) -> tuple[str, ...]:
    """The environments with a column of their own: the hard one if there is one, and all if they are few."""
    if HARD in table.columns:
        return (HARD,)
    return table.columns if len(table.columns) <= 6 else ()


def rows(rules: Sequence[RuleReport], dataset: str) -> list[str]:
    """For each rule the mean over environments, and those shown; the best method by the first rule comes first.

    Environments other than the hard one are shown for the first rule only.
    """
    first = rules[0].datasets[dataset]
    shown = {
        rule.rule: shown_environments(first) if rule is rules[0] or HARD in first.columns else () for rule in rules
    }
    means = ["mean"] if len(first.columns) > 1 else []
    titles = ["method", *(f"{name}{RULES[rule]}" for rule, names in shown.items() for name in (*means, *names))]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for method in sorted(first.methods, key=lambda method: -(first.averages[method].mean or 0.0)):
        cells: list[Cell | None] = []
        for rule in rules:
            assert rule.averages is not None
            cells += [rule.averages.cells.get((method, dataset)) for _ in means]
            cells += [rule.datasets[dataset].cells.get((method, name)) for name in shown[rule.rule]]
        lines.append(f"| {method} | {' | '.join(map(number, cells))} |")
    return lines


def table(archive: Path, dataset: str) -> str:
    """The table of one dataset, in Markdown."""
    return "\n".join(rows(report(archive, list(RULES), metrics=[]).rules, dataset))


def page() -> str:
    """The sections of all sets that have been run."""
    archives = {name: HERE / f"{name}.records.parquet" for name in SETS}
    sections = [
        f"## {TITLES.get(name, SETS[name])}\n\n{table(file, SETS[name])}\n"
        for name, file in archives.items()
        if file.is_file()
    ]
    return "\n".join(["# All methods", "", *sections])


if __name__ == "__main__":
    (HERE / "table.md").write_text(page(), encoding="utf-8")
