"""Generated records and a comparison of records, for tests."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from sandmask.records._types import RunRecord, RunSpec, Status


def made_up_run(
    accuracy_in: Sequence[Sequence[float]],
    accuracy_out: Sequence[Sequence[float]] | None = None,
    *,
    test_envs: Sequence[int] = (0,),
    every: int = 100,
    status: Status = "done",
    env_names: Sequence[str] | None = None,
    size: int | None = None,
    **spec: Any,
) -> RunRecord:
    """Make a run with these accuracies [checkpoints, environments]. "out" equals "in" unless given.

    With `size`, every split has this many examples, and accuracies have to be fractions k / size. Further arguments are
    fields of the spec: `algorithm="IRM"`, `hparams_seed=3`, ...
    """
    table = np.array(accuracy_in, dtype=np.float64)
    steps = np.arange(len(table), dtype=np.int64) * every
    fields: dict[str, Any] = {
        "dataset": "Toy",
        "algorithm": "ERM",
        "steps": (len(table) - 1) * every + 1,
        "checkpoint_every": every,
        "hparams": {"lr": 0.001},
        **spec,
    }
    return RunRecord(
        spec=RunSpec(test_envs=tuple(test_envs), **fields),
        env_names=tuple(env_names or map(str, range(table.shape[1]))),
        steps=steps,
        accuracy_in=table,
        accuracy_out=table.copy() if accuracy_out is None else np.array(accuracy_out, dtype=np.float64),
        metrics={"loss": np.linspace(1, 0, len(table))},
        status=status,
        diverged_at=int(steps[-1]) + 1 if status == "diverged" else None,
        classes=("no", "yes"),
        sizes=None if size is None else ((size,) * table.shape[1], (size,) * table.shape[1]),
    )


def made_up_sweep(
    algorithms: Sequence[str],
    *,
    environments: int = 3,
    draws: int = 4,
    trials: int = 2,
    checkpoints: int = 5,
    pairs: bool = False,
    size: int = 20,
    seed: int = 0,
    metrics: Sequence[str] = (),
    **spec: Any,
) -> list[RunRecord]:
    """Make a complete sweep with random accuracies k / size. A small size gives many ties.

    `pairs` adds runs that hold out every pair of environments. `metrics` are names of further curves, with random
    values from 0.9 to 1.
    """
    rng, curves = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    held_out: list[tuple[int, ...]] = [(env,) for env in range(environments)]
    if pairs:
        held_out += [(a, b) for a in range(environments) for b in range(a + 1, environments)]
    shape = (checkpoints, environments)
    runs = [
        made_up_run(
            (rng.integers(0, size + 1, shape) / size).tolist(),
            (rng.integers(0, size + 1, shape) / size).tolist(),
            test_envs=test_envs,
            algorithm=algorithm,
            trial_seed=trial,
            hparams_seed=draw,
            seed=int(rng.integers(2**31)),
            size=size,
            **{"hparams": {"lr": float(np.float32(0.001 * (draw + 1)))}, **spec},
        )
        for algorithm in algorithms
        for test_envs in held_out
        for trial in range(trials)
        for draw in range(draws)
    ]
    for run in runs:
        run.metrics.update({name: curves.uniform(0.9, 1.0, checkpoints) for name in metrics})
    return runs


def assert_same_runs(found: Iterable[RunRecord], expected: Iterable[RunRecord]) -> None:
    """Assert that two lists have equal records, to the last bit, of the same runs. The order may differ.

    :param found: the records to check.
    :param expected: the records of the same runs from elsewhere.
    """
    runs, known = list(found), {run.spec.id: run for run in expected}
    assert Counter(run.spec.id for run in runs) == dict.fromkeys(known, 1)
    for run in runs:
        for field in fields(RunRecord):
            one, other = (getattr(each, field.name) for each in (run, known[run.spec.id]))
            np.testing.assert_equal(one, other, err_msg=f"{field.name} of run {run.spec.id}")
