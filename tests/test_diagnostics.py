"""Reports written down in a loop of one's own."""

import csv
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

import sandmask
from sandmask.diagnostics import MaskLogger, report_figures
from sandmask.errors import SandmaskError


def train(logger: MaskLogger, steps: int) -> list[sandmask.MaskReport]:
    w, b = torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True)
    reports = []
    for step in range(steps):
        signs = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, (-1.0) ** step]])
        losses = [(w * row).sum() + b for row in signs]
        params = [("w", w), ("b", b)]
        reports.append(sandmask.backward(losses, params, sandmask.ANDMask(1.0), on_report=logger))
    return reports


def test_figures_have_the_names_of_the_records() -> None:
    (report,) = train(MaskLogger(), 1)
    figures = report_figures(report)
    assert [name for name in figures if "agreement" not in name] == [
        f"{kind}/{name}" for name in ("w", "b", "all") for kind in ("mask_density", "dead_fraction")
    ]
    assert figures["mask_density/w"] == pytest.approx(2 / 3)
    assert figures["dead_fraction/all"] == pytest.approx(1 / 4)
    assert [figures[f"agreement/all/{number}"] for number in range(10)] == [0.25, *[0] * 8, 0.75]
    assert list(report_figures(report, 2, per_tensor=False)) == [
        *("mask_density/all", "dead_fraction/all", "agreement/all/0", "agreement/all/1")
    ]


def test_every_so_many_steps_are_kept_and_the_others_not_read() -> None:
    logger = MaskLogger(every=3)
    reports = train(logger, 7)
    assert [row["step"] for row in logger.rows] == [0, 3, 6]
    assert [row["mask_density/w"] for row in logger.rows] == pytest.approx([2 / 3, 1 / 3, 2 / 3])
    assert [report._pending is None for report in reports] == [True, False, False, True, False, False, True]


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    with MaskLogger(tensorboard=tmp_path, every=2) as logger:
        reports = train(logger, 4)
    events = EventAccumulator(str(tmp_path)).Reload()
    expected = report_figures(reports[0])
    assert set(events.Tags()["scalars"]) == set(expected)
    for name in expected:
        points = events.Scalars(name)
        assert [point.step for point in points] == [0, 2]
        assert points[1].value == pytest.approx(report_figures(reports[2])[name])


def test_a_table_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "mask.csv"
    train(MaskLogger(csv=path, per_tensor=False, bins=1), 2)
    train(MaskLogger(csv=path, per_tensor=False, bins=1, start=2), 1)
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "name", "value"]
    assert [(row[0], row[1]) for row in rows] == [
        (str(step), name) for step in range(3) for name in ("mask_density/all", "dead_fraction/all", "agreement/all/0")
    ]
    assert float(rows[0][2]) == pytest.approx(0.75)


def test_every_has_to_be_a_count() -> None:
    with pytest.raises(SandmaskError, match="`every` should be at least 1"):
        MaskLogger(every=0)


def test_without_tensorboard_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SandmaskError, match=r"sandmask\[tensorboard\]"):
        MaskLogger(tensorboard=tmp_path)
