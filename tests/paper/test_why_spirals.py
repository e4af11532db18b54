"""Who finds the spiral, and what signatures decide: counted on runs whose answers are known."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.random import RandomState

from sandmask.paper import printed
from sandmask.paper.why import QUESTIONS, SPIRALS_QUESTIONS, why
from sandmask.paper.why_spirals import contrary, signature_alignment, signatures, spiral_draws, spiral_found
from sandmask.records import RunRecord
from sandmask.records.testing import made_up_run
from sandmask.reports import Grid

ENVIRONMENTS = 17


def run(test_env: int, special: list[float], validated: list[float], ends: float = 0.5, **spec: Any) -> RunRecord:
    """Accuracies at some checkpoints: on environment 0's unseen examples, on the others, on the one held out."""
    out = np.repeat(np.array(validated)[:, None], ENVIRONMENTS, axis=1)
    out[:, 0] = special
    seen = np.ones_like(out)  # what was trained on, environment 0 among it, is known by heart, and tells nothing
    seen[:, test_env] = ends
    fields: dict[str, Any] = {"dataset": "Spirals", "network": "mlp", "algorithm": "ANDMask", **spec}
    return made_up_run(seen.tolist(), out.tolist(), test_envs=(test_env,), **fields)


def row(grid: Grid, *first: str) -> tuple[str, ...]:
    return next(row[len(first) :] for row in grid.rows if row[: len(first)] == first)


def hparams(tau: float) -> dict[str, float]:
    return {"tau": tau, "lr": 0.01, "batch_size": 512, "mlp_depth": 3, "mlp_width": 256}


@pytest.fixture(scope="module")
def runs() -> list[RunRecord]:
    """Draw 1 finds the spiral and loses it, draw 2 finds it too late to be judged by it, draw 0 never does."""
    return [
        *(run(e, [0.5, 0.6], [0.7, 0.8], hparams_seed=0, seed=e, hparams=hparams(0.1)) for e in (0, 1, 2)),
        *(run(e, [0.9, 0.5], [1.0, 0.7], hparams_seed=1, seed=e, hparams=hparams(1.0)) for e in (0, 1)),
        run(2, [0.8, 0.9], [0.9, 0.6], hparams_seed=2, hparams=hparams(0.5)),
    ]


def test_who_finds_the_spiral_keeps_it_and_is_chosen(runs: list[RunRecord]) -> None:
    # with 1 and 2 held out: four runs, two choices; 80% is not more than 80%
    assert row(spiral_found(runs, "Spirals"), "ANDMask") == ("1 of 4", "1 of 4", "1 of 2", "1 of 2", "1 of 2")


def test_the_worst_environment_tells_who_follows_the_spiral() -> None:
    by_signatures = run(1, [0.5], [1.0], ends=0.3, hparams_seed=0)
    by_spiral = run(1, [0.9], [0.95], ends=0.9, hparams_seed=1)
    chosen = row(spiral_found([by_signatures, by_spiral], "Spirals"), "ANDMask")[2:4]
    assert chosen == ("0 of 1", "1 of 1")


def test_draws_that_find_it_are_listed_with_their_settings(runs: list[RunRecord]) -> None:
    grid = spiral_draws(runs, "Spirals")
    assert len(grid.rows) == 1
    assert row(grid, "ANDMask", "0", "1") == ("1.00", "0.01", "512", "3", "256", "2 of 2", "0 of 2")


def test_alignment_is_that_of_the_generator() -> None:
    rows = [RandomState(e).standard_normal((16, 16))[e] for e in range(16)]
    for place, (cosine, mine) in enumerate(zip(signature_alignment(), rows, strict=True)):
        others = [sum(row[k] for other, row in enumerate(rows) if other != place) for k in range(16)]
        dot = sum(a * b for a, b in zip(mine, others, strict=True))
        assert cosine == pytest.approx(dot / math.hypot(*mine) / math.hypot(*others), abs=1e-6)


def test_signatures_are_correlated_with_where_runs_end() -> None:
    cosine = signature_alignment()
    ends = [run(e, [0.5], [0.9], ends=(1 + cosine[e - 1]) / 2, seed=s) for e in range(1, 16) for s in (0, 1)]
    against = [run(e, [0.5], [0.9], ends=(1 - cosine[e - 1]) / 2, algorithm="ERM") for e in range(1, 16)]
    grid = signatures([*ends, *against], "Spirals")
    assert row(grid, "rank correlation", "") == ("+1.00", "-1.00")
    assert row(grid, "1") == (f"{cosine[0]:+.2f}", f"{50 + 50 * cosine[0]:.0f}", f"{50 - 50 * cosine[0]:.0f}")


def test_the_contrary_environments_are_those_of_least_alignment() -> None:
    low = sorted(1 + int(place) for place in np.argsort(signature_alignment()[:15])[:2])
    assert low == [1, 14]
    grid = contrary([run(e, [0.5], [0.9], ends=0.2 if e in low else 0.9) for e in range(16)], "Spirals")
    cells = [printed("oracle", "Spirals", "ANDMask", str(e)) for e in low]
    paper = np.mean([cell.mean for cell in cells if cell is not None])
    mine = row(grid, "ANDMask")
    assert mine[0].startswith(f"{(14 * 90 + 2 * 20) / 16:.1f} [")
    assert mine[1] == f"20.0 [{paper:.1f}]"
    assert mine[2].startswith("90.0 [")
    part = contrary([run(1, [0.5], [0.9], ends=0.2)], "Spirals")
    assert row(part, "ANDMask")[0] == row(part, "ANDMask")[1]  # the paper's mean is of the same environments
    assert row(part, "ANDMask")[2] == "-"


def test_spirals_is_asked_all_of_it(runs: list[RunRecord]) -> None:
    titles = [grid.title for grid in why(runs, "Spirals").grids]
    assert len(titles) == len(QUESTIONS) + len(SPIRALS_QUESTIONS)
    assert [grid.title for grid in why(runs, "Spirals", ["spiral"]).grids] == ["Spirals: who finds the spiral"]
