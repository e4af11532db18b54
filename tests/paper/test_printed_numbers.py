"""The printed numbers: complete, and every cell where the paper's own arithmetic is off is listed."""

from collections import Counter
from decimal import Decimal

import pytest

from sandmask.paper import (
    AVERAGE,
    INCONSISTENCIES,
    SLIPS,
    Inconsistency,
    PrintedCell,
    algorithms,
    datasets,
    environments,
    printed,
    printed_cells,
)

HALF = Decimal("0.05")
SELECTIONS = ("training-domain", "oracle")


def averaged(average: PrintedCell) -> list[Decimal]:
    """The printed values that a printed average is the average of."""
    if average.table == "appendix":
        parts = [
            cell
            for cell in printed_cells()
            if (cell.table, cell.selection, cell.dataset) == ("appendix", average.selection, average.dataset)
            and cell.environment != AVERAGE
        ]
    else:
        parts = [cell for cell in printed_cells() if cell.table == average.table and cell.dataset != AVERAGE]
    return [Decimal(cell.mean_digits) for cell in parts if cell.algorithm == average.algorithm]


def found() -> list[Inconsistency]:
    result = []
    for cell in printed_cells():
        if cell.environment != AVERAGE or (cell.table != "appendix" and cell.dataset != AVERAGE):
            continue
        values = averaged(cell)
        mean = sum(values, Decimal(0)) / len(values)
        off = abs(mean - Decimal(cell.mean_digits))
        if off > HALF:
            result.append(
                Inconsistency(
                    cell.table,
                    cell.selection,
                    cell.dataset,
                    cell.algorithm,
                    cell.mean_digits,
                    f"{mean:.4f}",
                    # The average was rounded once, and so was each of its parts.
                    explained_by_rounding=off < HALF + HALF,
                )
            )
    return result


def test_the_listed_inconsistencies_are_exactly_those_found() -> None:
    assert found() == list(INCONSISTENCIES)
    assert [item.algorithm for item in INCONSISTENCIES if not item.explained_by_rounding] == ["SANDMask"] * 3


def test_the_main_text_and_the_appendix_differ_only_where_listed() -> None:
    appendix = {
        (cell.selection, cell.dataset, cell.algorithm): cell.mean_digits
        for cell in printed_cells()
        if cell.table == "appendix" and cell.environment == AVERAGE
    }
    differing = [
        (cell.table, cell.selection, cell.dataset, cell.algorithm)
        for cell in printed_cells()
        if cell.table != "appendix"
        and cell.dataset != AVERAGE
        and appendix[cell.selection, cell.dataset, cell.algorithm] != cell.mean_digits
    ]
    assert differing == [("2", "oracle", "DomainNet", "SANDMask")]
    unusual = [
        (cell.table, cell.selection, cell.dataset, cell.algorithm)
        for cell in printed_cells()
        if cell.table != "appendix" and len(cell.mean_digits.split(".")[1]) != 1
    ]
    listed = [(slip.table, slip.selection, slip.dataset, slip.algorithm) for slip in SLIPS]
    assert listed == differing + unusual


def test_every_table_is_complete() -> None:
    sizes = {"ColoredMNIST": 3, "RotatedMNIST": 6, "VLCS": 4, "PACS": 4, "OfficeHome": 4, "TerraIncognita": 4}
    sizes |= {"DomainNet": 6, "Spirals": 16}
    assert set(datasets()) == set(sizes)
    assert len(algorithms()) == 16
    assert algorithms()[0] == "ERM"
    assert algorithms()[-2:] == ("ANDMask", "SANDMask")
    for dataset, size in sizes.items():
        assert len(environments(dataset)) == size
        rows = ("ERM", "IRM", "ANDMask", "SANDMask") if dataset == "Spirals" else algorithms()
        for algorithm in rows:
            for selection in SELECTIONS:
                for environment in (*environments(dataset), AVERAGE):
                    assert printed(selection, dataset, algorithm, environment) is not None
    cells = Counter(cell.table for cell in printed_cells())
    assert cells["1"] == cells["2"] == 16 * 8
    assert cells["3"] == 4 * 2
    assert cells["appendix"] == 2 * (16 * sum(size + 1 for name, size in sizes.items() if name != "Spirals") + 4 * 17)
    keys = [(cell.table, cell.selection, cell.dataset, cell.environment, cell.algorithm) for cell in printed_cells()]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("arguments", "mean", "error"),
    [
        (("training-domain", "ColoredMNIST", "ERM"), 51.5, 0.1),
        (("oracle", "DomainNet", "SANDMask"), 32.3, 0.6),
        (("oracle", "Avg", "SANDMask"), 67.2, None),
        (("training-domain", "Spirals", "SANDMask"), 49.2, 5.4),
        (("oracle", "Spirals", "ANDMask"), 97.25, 0.3),
        (("training-domain", "Spirals", "ANDMask", "13"), 45.4, 23.5),
        (("training-domain", "ColoredMNIST", "ARM", "+90%"), 82.0, 0.5),
        (("oracle", "TerraIncognita", "ANDMask", "L46"), 41.3, 0.6),
        (("oracle", "DomainNet", "SANDMask", "sketch"), 39.9, 0.6),
        (("training-domain", "DomainNet", "MMD", "clip"), 32.1, 13.3),
    ],
)
def test_cells_read_off_the_page(arguments: tuple[str, ...], mean: float, error: float | None) -> None:
    cell = printed(*arguments)
    assert cell is not None
    assert (cell.mean, cell.error) == (mean, error)


def test_what_the_paper_does_not_print_is_none() -> None:
    assert printed("leave-one-domain-out", "PACS", "ERM") is None
    assert printed("oracle", "PACS", "SD") is None
    assert printed("oracle", "Toy", "ERM") is None
    assert environments("Toy") == ()
