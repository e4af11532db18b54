"""Tables beside the printed ones: verdicts, gaps, and which runs belong to which table."""

import math
from dataclasses import replace

import numpy as np
import pytest

from sandmask.errors import SandmaskError
from sandmask.paper import AVERAGE, PrintedCell, printed
from sandmask.paper._compare import MARKS, Compared, compare
from sandmask.paper.tables import TABLES, table_1, table_2, table_3, table_pacs
from sandmask.records import RunRecord
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.reports import Cell, build_report


def compared(ours: float, ours_error: float | None, paper: str, paper_error: str, have: int = 3) -> Compared:
    cell = Cell(mean=ours, error=ours_error, have=have, expected=3)
    theirs = PrintedCell("1", "oracle", "X", "0", "ERM", paper, paper_error)
    return Compared("oracle", "X", "0", "ERM", cell, theirs, comparable=True)


@pytest.mark.parametrize(
    ("cell", "verdict"),
    [
        (compared(50.0, 3.0, "54.0", "4.0"), "within"),
        (compared(50.0, 3.0, "59.0", "4.0"), "within two"),
        (compared(50.0, 3.0, "61.0", "4.0"), "beyond"),
        (compared(100.0, 0.0, "100.0", "0.0"), "within"),
        (compared(99.96, 0.0, "100.0", "0.0"), "within"),  # what prints as 100.0
        (compared(99.9, 0.0, "100.0", "0.0"), "beyond"),
        (compared(50.0, None, "50.0", "1.0"), "no error"),
        (compared(50.0, 3.0, "50.0", ""), "no error"),
        (compared(50.0, 3.0, "50.0", "1.0", have=2), "incomplete"),
    ],
)
def test_verdicts(cell: Compared, verdict: str) -> None:
    assert cell.verdict == verdict
    assert cell.words.endswith(MARKS.get(verdict, "]"))
    if cell.joint_error is not None and cell.paper is not None and cell.paper.error is not None:
        assert cell.joint_error == math.sqrt((cell.ours.error or 0) ** 2 + cell.paper.error**2)


@pytest.fixture(scope="module")
def spirals() -> list[RunRecord]:
    methods = ["ERM", "ANDMask", "ANDMask-rescaled", "SANDMask-released"]
    return made_up_sweep(methods, environments=17, draws=2, trials=2, dataset="Spirals", network="mlp", checkpoints=3)


def test_cells_are_those_of_the_report_and_of_the_paper(spirals: list[RunRecord]) -> None:
    cells = {(c.rule, c.environment, c.method): c for c in compare(spirals, ["Spirals"], draws=2, trials=2)}
    assert len(cells) == 2 * 17 * 4  # sixteen environments and the average; the seventeenth is not in the tables
    report = build_report(spirals, ["oracle"], draws=2, trials=2).rules[0]
    cell = cells["oracle", "3", "ANDMask-rescaled"]
    assert cell.ours.mean == report.datasets["Spirals"].cells["ANDMask-rescaled", "3"].mean
    assert cell.paper == printed("oracle", "Spirals", "ANDMask", "3")
    average = cells["training-domain", AVERAGE, "SANDMask-released"]
    assert average.paper == printed("training-domain", "Spirals", "SANDMask")
    assert average.paper is not None
    assert (average.paper.mean, average.paper.error) == (49.2, 5.4)  # Table 3 has an error, the appendix has none
    assert average.difference == pytest.approx((average.ours.mean or 0) - 49.2)


def test_table_3_counts_its_verdicts_and_marks_what_is_missing(spirals: list[RunRecord]) -> None:
    product = table_3(spirals, draws=2, trials=2)
    assert sum(product.summary["cells"].values()) == 2 * 16 * 4
    assert "incomplete" not in product.summary["cells"]
    assert len(product.data["table-3"]) == 2 * 17 * 4
    lacking = table_3(spirals)  # by the paper's protocol: 20 draws, 3 trials
    assert lacking.summary["cells"] == {"incomplete": 2 * 16 * 4}
    assert "(4/60 runs)" in lacking.words()
    assert "(64/960 runs)" in lacking.words()


def test_an_incomplete_average_is_the_mean_of_its_row_and_of_the_report(spirals: list[RunRecord]) -> None:
    erm = [run for run in spirals if run.spec.algorithm == "ERM"]
    lacking = [run for run in erm if run.spec.trial_seed == 0 or run.spec.test_envs != (3,)]  # trial 1 lacks a column

    def average(runs: list[RunRecord], trials: int) -> Cell:
        cells = compare(runs, ["Spirals"], ["oracle"], draws=2, trials=trials)
        return next(cell.ours for cell in cells if cell.environment == AVERAGE)

    part = average(lacking, 3)
    row = [cell.ours.mean for cell in compare(lacking, ["Spirals"], ["oracle"], draws=2, trials=3)][:-1]
    assert part.mean == pytest.approx(np.mean([mean for mean in row if mean is not None]))
    sixteen = [run for run in lacking if run.spec.test_envs[0] < 16]
    assert (
        part.mean
        == build_report(sixteen, ["oracle"], draws=2, trials=3).rules[0].datasets["Spirals"].averages["ERM"].mean
    )
    assert (part.error, part.complete) == (None, False)
    both = average(erm, 3)
    assert both.mean == pytest.approx(average(erm, 2).mean)
    assert both.error == pytest.approx(average(erm, 2).error)
    assert not both.complete
    assert average([run for run in erm if run.spec.test_envs != (3,)], 3).mean is None


def test_tables_say_which_numbers_are_of_untrained_networks() -> None:
    def runs(tau: float) -> list[RunRecord]:
        made = made_up_sweep(["SANDMask"], draws=1, trials=1, dataset="ColoredMNIST", network="mnist-convnet")
        return [replace(run, spec=replace(run.spec, hparams={**run.spec.hparams, "tau": tau})) for run in made]

    assert "are untrained" in table_2(runs(1.0)).words()
    assert "are untrained" not in table_2(runs(0.9)).words()


def test_tables_1_and_2_take_the_papers_network_only() -> None:
    mnist = made_up_sweep(["ERM", "SANDMask"], dataset="ColoredMNIST", network="mnist-convnet", env_names=None)
    mnist = [replace(run, env_names=("+90%", "+80%", "-90%")) for run in mnist]
    pacs = [
        replace(run, env_names=("A", "C", "P", "S"))
        for run in made_up_sweep(["ERM"], environments=4, dataset="PACS", network="small")
    ]
    first, second = (make([*mnist, *pacs], draws=4, trials=2) for make in (table_1, table_2))
    assert set(first.data["table-1"].dataset) == {"ColoredMNIST"}
    assert set(first.data["table-1"].selection) == {"training-domain"}
    assert set(second.data["table-2"].selection) == {"oracle"}
    own = table_pacs([*mnist, *pacs])
    assert set(own.data["table-pacs"].dataset) == {"PACS"}
    assert "Not the paper's table: small instead of resnet50" in own.words()
    assert own.summary["cells"] == {"not comparable": 2 * 4}
    assert not set(MARKS.values()) & set(own.words().replace("τ =", "").split())
    with pytest.raises(SandmaskError, match="no runs on PACS with another network"):
        table_pacs(mnist)


def test_what_has_nothing_to_show_says_so() -> None:
    with pytest.raises(SandmaskError, match="no runs on Spirals"):
        table_3([made_up_run([[0.5, 0.5]])])
    message = str(TABLES["table-1"].needs_records())
    assert "sandmask sweep run runs/colored_mnist --config results/paper/colored_mnist.toml" in message
    assert "--records runs/colored_mnist --records runs/rotated_mnist" in message
