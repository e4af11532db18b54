"""Figure 2: what is varied reaches the runs, the search is kept apart, and everything comes back from records."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sandmask.datasets import DATASETS, load_dataset
from sandmask.errors import SandmaskError
from sandmask.paper import _train
from sandmask.paper import figure_2_runs as failure
from sandmask.paper.figure_2 import figure_2, noise_ceiling, results, summarize
from sandmask.records import RunRecord, RunSpec, read_runs, write_archive
from sandmask.records.testing import made_up_run
from sandmask.training import Stack, make_spec, train_stack

CPU = torch.device("cpu")
TINY = failure.Design(
    momenta=(0.0, 0.9),
    noises=(0.0, 0.1),
    scales=(1.0, 2.0),
    seeds=2,
    steps=11,
    draws=2,
    search_seeds=1,
    shapes=(("batch_size", 4), ("mlp_width", 8), ("mlp_depth", 3), ("dropout", 0)),
)


def test_conditions_that_panels_share_are_trained_once() -> None:
    specs = failure.FULL.specs({method: {} for method in failure.METHODS})
    assert len(specs) == 5 * 20 * (1 + 4 + 4 + 4)
    assert len({spec.id for spec in specs}) == len(specs)
    stacks = _train.stacks(specs)
    assert len(stacks) == 5 * 5  # a program a method and noise; momenta, scales and seeds are stacked
    assert max(map(len, stacks)) == 20 * 9
    search = failure.FULL.search()
    assert {spec.seed for spec in search}.isdisjoint({spec.seed for spec in specs})
    assert (
        len({tuple(sorted(spec.hparams.items())) for spec in search if spec.algorithm == "ERM"}) == failure.FULL.draws
    )


def test_momentum_and_scale_reach_the_run() -> None:
    base = make_spec(
        DATASETS["Spirals"], "ANDMask", [0], steps=5, hparams={"batch_size": 4, "mlp_width": 8, "tau": 0.0}
    )
    specs = [
        replace(base, hparams={**base.hparams, "adam_beta1": beta, "init_scale": scale})
        for beta, scale in ((0.9, 1.0), (0.0, 1.0), (0.9, 2.0))
    ]
    stack = Stack(specs, load_dataset("Spirals"), CPU)
    state = stack.init()
    torch.testing.assert_close(state["params"][2], 2 * state["params"][0])
    torch.testing.assert_close(state["params"][1], state["params"][0])
    plain = Stack([base], load_dataset("Spirals"), CPU)
    alone = plain.init()
    for batch, batch_alone in zip(stack.feed(0), plain.feed(0), strict=True):
        state, _ = stack.step(state, batch)
        alone, _ = plain.step(alone, batch_alone)
    torch.testing.assert_close(state["params"][0], alone["params"][0], atol=1e-5, rtol=1e-4)
    assert (state["params"][1] - state["params"][0]).abs().max() > 1e-3


def test_adam_without_momentum_is_rmsprop_with_a_correction() -> None:
    from sandmask.functional.adam import adam_init, adam_step

    params, gradient = torch.tensor([1.0, -2.0]), torch.tensor([0.3, 0.1])
    expected = torch.nn.Parameter(params.clone())
    optimizer = torch.optim.Adam([expected], lr=0.1, betas=(0.0, 0.999))
    state = adam_init(params)
    for scale in (1.0, -0.5, 2.0):
        expected.grad = gradient * scale
        optimizer.step()
        params, state = adam_step(params, gradient * scale, state, 0.1, 0.0, (torch.tensor(0.0), 0.999))
    torch.testing.assert_close(params, expected.detach())


def test_the_search_keeps_the_best_draw() -> None:
    def run(draw: int, seed: int, accuracy: float, status: str = "done") -> object:
        made = made_up_run(
            [[0.0] * 3, [accuracy, 0.0, 0.0]], algorithm="ERM", hparams_seed=draw, seed=failure.SEARCH_SEED + seed
        )
        hparams = {"lr": float(draw), "adam_beta1": 0.9}
        return replace(made, spec=replace(made.spec, hparams=hparams), status=status)  # type: ignore[arg-type]

    runs = [run(0, 0, 0.9), run(0, 1, 0.5), run(1, 0, 0.8), run(1, 1, 0.8), run(2, 0, 1.0, "diverged")]
    assert failure.best_settings(runs) == {"ERM": {"lr": 1.0}}  # type: ignore[arg-type]


def test_a_stopped_figure_goes_on_and_comes_back_from_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "METHODS", ("ERM", "ANDMask"))
    calls: list[str] = []

    def stopping(specs: Sequence[RunSpec], *args: Any, **options: Any) -> list[RunRecord]:
        calls.append(specs[0].algorithm)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return train_stack(specs, *args, **options)

    monkeypatch.setattr(_train, "train_stack", stopping)
    with pytest.raises(KeyboardInterrupt):
        failure.train(TINY, tmp_path, CPU, lambda *_: None)
    told: list[tuple[int, int]] = []
    runs = failure.train(TINY, tmp_path, CPU, lambda what, done, total: told.append((done, total)))
    assert len(calls) == 4 + (2 + 4) - 3  # three stacks were done before the stop
    assert told[-1][0] == told[-1][1]
    assert len(runs) == 2 * 2 + 2 * 2 * 4
    write_archive(runs, tmp_path / "all.records.parquet")
    monkeypatch.setattr("sandmask.paper.figure_2.noise_ceiling", lambda noise: 1 - noise)
    again = figure_2(read_runs(tmp_path / "all.records.parquet"))
    assert again.words() == figure_2(runs).words()
    data = again.data["figure-2-runs"]
    assert len(data) == 3 * 2 * 2 * 2  # panels x values x methods x seeds
    shared = data[(data.value == data.panel.map({"momentum": 0.9, "noise": 0.0, "init": 1.0}))]
    assert shared.groupby(["method", "seed"]).test_accuracy.nunique().max() == 1


def test_summaries_are_over_seeds() -> None:
    made = [
        made_up_run(
            [[a] + [0.5] * 16],
            algorithm="ERM",
            seed=seed,
            hparams={"adam_beta1": 0.9},
            options={"noise": 0.0, "init_scale": 1.0},
        )
        for seed, a in enumerate((0.5, 0.95, 1.0))
    ]
    row = summarize(results(made)).iloc[0]
    assert row["mean"] == pytest.approx(np.mean([0.5, 0.95, 1.0]))
    assert row["error"] == pytest.approx(np.std([0.5, 0.95, 1.0]) / np.sqrt(3))
    assert (row["solved"], row["failed"]) == pytest.approx((2 / 3, 1 / 3))
    with pytest.raises(SandmaskError, match="no runs of Figure 2"):
        results([made_up_run([[0.5, 0.5]])])


def test_the_ceiling_falls_with_the_noise() -> None:
    values = [noise_ceiling(noise) for noise in (0.0, 0.1, 0.4)]
    assert values[0] == 1.0
    assert 0.9 < values[1] < 1.0
    assert 0.5 < values[2] < 0.65
