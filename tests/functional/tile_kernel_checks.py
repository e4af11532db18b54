"""The benchmark of tiles on small shapes: kernels with their present constants and with a candidate, against float64.

On a GPU, or in a process with TRITON_INTERPRET=1, where Triton's interpreter runs the kernels on the CPU.
"""

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import _candidates, tiles
from benchmarks import _tiles_convnet as convnet
from benchmarks import _tiles_norm as norm
from benchmarks import _tiles_spirals as spirals
from benchmarks._candidates import Case, Constant, Reading, measure, ranked, verdict
from torch import Tensor
from triton.runtime.errors import OutOfResources

from sandmask.functional.kernels import dense
from sandmask.functional.kernels.tiles import SPLIT, Tiles

shared = importlib.import_module("conv_kernel_checks")
LAYERS = ((convnet.Layer(16, 16, 6, 2), 1), (convnet.Layer(32, 16, 3, 1), 2))
IMAGES = convnet.Sizes(2, 2, 4, LAYERS, context=convnet.Layer(16, 16, 4, 1, 5), first=convnet.Layer(2, 16, 4, 1))
PLANS = {
    "spirals": tiles.Plan("fp32x3", spirals.cases, spirals.Sizes(2, 3, 20, 18, 48)),
    "convnet, bf16": tiles.Plan("bf16", convnet.cases, IMAGES),
    "convnet, fp32x3": tiles.Plan("fp32x3", convnet.cases, IMAGES._replace(kind=SPLIT)),
    "norm, bf16": tiles.Plan("bf16", norm.cases, norm.Sizes(2, 2, 4, ((5, 16, 1), (3, 32, 2)), (5, 16))),
    "norm, fp32x3": tiles.Plan("fp32x3", norm.cases, norm.Sizes(2, 4, 4, ((5, 16, 1), (3, 32, 2)), (5, 16))),
}
NARROW = Constant(dense, "NARROW")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (spirals, convnet, norm):
        monkeypatch.setattr(module, "DEVICE", shared.DEVICE)
    monkeypatch.setattr(_candidates, "_seconds", lambda _: 1e-6)


def with_one_candidate(plan: tiles.Plan) -> tiles.Plan:
    def cases(sizes: Any) -> Iterator[Case]:
        for case in plan.cases(sizes):
            yield dataclasses.replace(case, candidates=case.candidates[:1])

    return plan._replace(cases=cases)


@pytest.mark.parametrize("name", PLANS)
def test_kernels_agree_with_float64_under_other_constants(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    tiles.run([with_one_candidate(PLANS[name])], tiles.Log(log))
    table = [line for line in log.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(table) % 3 == 0  # the present constants, a candidate, and the present ones again
    assert all(line.endswith("| yes |") for line in table), table


def case(candidates: list[tuple[Any, ...]], factors: dict[int, float]) -> Case:
    """A case whose launch returns the exact result times the factor of its rows, or does not fit."""

    def launch() -> Tensor:
        rows = dense.NARROW.rows
        if rows == 1024:
            raise OutOfResources(2, 1, "shared memory")
        return torch.full((2, 3), factors.get(rows, 1.0))

    return Case("a kernel", (NARROW,), candidates, launch, lambda: (torch.ones(3, dtype=torch.float64),), 1e-3)


def test_candidates_that_do_not_fit_or_are_wrong_are_reported() -> None:
    present = dense.NARROW
    others = [present._replace(rows=rows) for rows in (1024, 32, 16)]
    found = list(measure(case([(tiles,) for tiles in others], {32: 1.1, 16: float("nan")}), n_runs=2))
    assert present is dense.NARROW
    remarks = [reading.remark for reading in found]
    assert remarks[0] == remarks[-1] == ""
    assert remarks[1].startswith("does not fit")
    assert remarks[2:4] == ["no", "no"]
    assert [reading.microseconds for reading in found] == pytest.approx([0.5, 0.0, 0.5, 0.5, 0.5])
    assert [reading.remark for reading in ranked(found)][:2] == ["", ""]


def test_the_present_constants_are_measured_once_more_and_none_keeps_a_value() -> None:
    found = list(measure(case([(None,), (dense.NARROW,)], {}), n_runs=1))
    assert len(found) == 2
    assert found[0].setting == found[1].setting == f"kernels.dense.NARROW = {tuple(dense.NARROW)}"
    assert str(Constant(dense, "TABLE", SPLIT)) == "kernels.dense.TABLE[SPLIT]"


def test_a_verdict_names_the_fastest_that_is_as_exact() -> None:
    def reading(setting: str, microseconds: float, error: float = 1e-7, remark: str = "") -> Reading:
        return Reading("a kernel", setting, microseconds, error, remark)

    now, again = reading("now", 2.0), reading("now", 2.1)
    others = [reading("a", 1.5), reading("b", 1.0, 3e-7), reading("c", 0.5, 1.0, "no"), reading("d", 1.7)]
    told = verdict([now, *others, again])
    assert "as exact: set a: 1.500, saves 0.500" in told
    assert "less exact: set b: 1.000" in told
    assert "set c" not in told
    assert "keep" in verdict([now, reading("a", 1.95), again])
    assert "do not run" in verdict([now, reading("a", 1.0), reading("now", 0.0, 0.0, "does not fit")])


def test_compiling_in_advance_survives_what_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = case([(Tiles(1024, 64, 32, 4, 1),)], {})
    monkeypatch.setattr(tiles, "plans", lambda _: [tiles.Plan("fp32x3", lambda _: iter([found]), spirals.Sizes())])
    monkeypatch.setattr(tiles, "PROCESSES", 1)
    tiles.compile_some(0, "spirals")
    assert capsys.readouterr().out.startswith("a kernel: kernels.dense.NARROW = (1024, 64, 32, 4, 1): out of resource")


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [len(tiles.plans(name)) for name in tiles.SECTIONS] == [1, 6, 2]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tiles.main()
    assert capsys.readouterr().out == "tiles: needs a CUDA device; skipped.\n"

    def broken(_: Any) -> Iterator[Case]:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tiles, "machine", lambda: "here")
    plans = [tiles.Plan("fp32x3", cases, spirals.Sizes()) for cases in (broken, lambda _: iter([case([], {})]))]
    monkeypatch.setattr(tiles, "plans", lambda _: plans)
    monkeypatch.setattr("sys.argv", ["tiles", "norm", "quick", str(tmp_path / "log")])
    tiles.main()
    lines = (tmp_path / "log").read_text()
    assert lines == capsys.readouterr().out
    assert "OutOfMemoryError: too large" in lines
    assert "a kernel: 0.004 microseconds now" in lines
    assert "seconds in all" in lines
