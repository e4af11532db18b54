from dataclasses import replace

import pytest

from sandmask.datasets import DATASETS, load_dataset
from sandmask.records import RunSpec
from sandmask.sweeps import Estimator, Plan, PlannedStack, StackEstimate, SweepSpec, _cost, _plan, expand
from sandmask.sweeps._cost import Rates
from sandmask.sweeps._expand import Expansion
from sandmask.sweeps._job import JobOptions
from sandmask.training import make_spec

SWEEP = SweepSpec(("DebugVector",), ("ERM",), n_trials=8, n_hparams=1, hparams={"mlp_width": 8, "batch_size": 8})
EXPANSION = expand(SWEEP)
RUNS = EXPANSION.runs


def estimator(*, measure: bool = False) -> Estimator:
    return Estimator(EXPANSION, JobOptions(""), "cpu", measure=measure)


def set_free_runs(monkeypatch: pytest.MonkeyPatch, count: float) -> None:
    """Free memory for so many runs, by the guess of what a run takes."""
    free = count * estimator().estimate(PlannedStack(RUNS[:1])).memory_bytes / _cost.SHARE
    monkeypatch.setattr(_plan, "available_memory", lambda _: free)


@pytest.mark.parametrize(
    ("free", "workers", "most", "size"),
    [
        (1000, 1, None, 24),
        (1000, 2, None, 12),
        (1000, 1, 5, 5),
        (10.5, 1, None, 10),
        (10.5, 2, None, 5),
        (0.1, 1, None, 1),
    ],
)
def test_stacks_fit_into_the_memory_that_workers_share(
    monkeypatch: pytest.MonkeyPatch, free: float, workers: int, most: int | None, size: int
) -> None:
    set_free_runs(monkeypatch, free)
    assert len(RUNS) == 24
    assert estimator().cap(len(RUNS), workers, most)(RUNS) == size


@pytest.mark.parametrize(("elsewhere", "size"), [("cpu", _plan.MOST), ("cuda", _plan.MOST_ON_GPU)])
def test_stacks_for_other_machines_do_not_depend_on_the_memory_of_this_one(
    monkeypatch: pytest.MonkeyPatch, elsewhere: str, size: int
) -> None:
    set_free_runs(monkeypatch, 0.1)
    cap = Estimator(EXPANSION, JobOptions(""), "cpu", elsewhere=elsewhere).cap(1000)
    assert cap(RUNS) == len(RUNS)
    assert cap(RUNS * 30) == size


def test_memory_is_measured_only_where_the_guess_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[RunSpec] = []

    def calibrate(spec: RunSpec, *_: object, **__: object) -> Rates:
        measured.append(spec)
        return Rates(step_seconds=0.0, seconds=0.0, bytes=_cost.GUESSED_BYTES / 2)

    monkeypatch.setattr(_plan, "calibrate", calibrate)
    cap = estimator(measure=True).cap(len(RUNS))
    set_free_runs(monkeypatch, 24.5)
    assert (cap(RUNS), len(measured)) == (24, 0)
    set_free_runs(monkeypatch, 8.25)
    assert (cap(RUNS), len(measured)) == (16, 1)
    assert (cap(RUNS), len(measured)) == (16, 1)  # once for all runs of a kind


def test_a_measurement_is_plausible() -> None:
    measuring = estimator(measure=True)
    one, many = (measuring.estimate(PlannedStack(RUNS[:count])) for count in (1, 24))
    assert one.seconds is not None
    assert many.seconds is not None
    assert 0 < one.seconds <= many.seconds < 3600
    assert one.memory_bytes < many.memory_bytes < 2**33
    assert estimator(measure=False).estimate(PlannedStack(RUNS)).seconds is None


def test_a_network_is_built_once_for_all_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[RunSpec] = []

    def count(spec: RunSpec, *_: object) -> int:
        built.append(spec)
        return int(1000 * spec.hparams["mlp_width"])

    monkeypatch.setattr(_plan, "parameters_of", count)
    work = estimator().step_work
    one, two, wide = (
        replace(RUNS[0], hparams={**RUNS[0].hparams, **changes})
        for changes in ({}, {"batch_size": 16}, {"mlp_width": 80})
    )
    assert _plan.CPU_STEP < work(one) < work(two) < work(wide)
    assert built == [one, wide]
    on_gpu = Estimator(EXPANSION, JobOptions(""), "cpu", elsewhere="cuda").step_work
    assert on_gpu(one) - work(one) == pytest.approx(_plan.GPU_STEP - _plan.CPU_STEP)


@pytest.mark.parametrize("algorithm", ["DANN", "CDANN", "ADRMX"])
def test_a_convnet_is_built_once_for_all_discriminators(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = load_dataset("Debug28")
    entry, network = DATASETS["Debug28"], "mnist-convnet"
    specs = [
        make_spec(entry, algorithm, [0], network=network, hparams={"mlp_width": width, "mlp_depth": 2})
        for width in (8, 32)
    ]
    assert len({_cost.parameters_of(spec, dataset) for spec in specs}) == 1
    built: list[RunSpec] = []

    def count(spec: RunSpec, *_: object) -> int:
        built.append(spec)
        return 1000

    monkeypatch.setattr(_plan, "parameters_of", count)
    measuring = Estimator(Expansion(tuple(specs), {entry.name: entry.name}), JobOptions(""), "cpu", measure=False)
    for spec in specs:
        measuring.step_work(spec)
    assert len(built) == 1


def test_workers_that_share_a_gpu_hide_fixed_costs_only() -> None:
    def plan(seconds: list[tuple[float, float]], workers: int, devices: int | None) -> Plan:
        stacks = tuple(StackEstimate(PlannedStack(RUNS[:1]), took, 0, 0, full) for took, full in seconds)
        return Plan(len(stacks), 0, stacks, workers, devices=devices)

    mixed = [(10.0, 4.0)] * 8
    assert plan(mixed, 1, 1).seconds == 80
    assert plan(mixed, 2, 1).seconds == 40
    assert plan(mixed, 8, 1).seconds == 32  # the GPU is full
    assert plan(mixed, 8, 2).seconds == 16
    assert plan(mixed, 8, None).seconds == 10  # a core each
    assert plan([(10.0, 1.0), (1.0, 0.1)], 8, 1).seconds == 10  # the longest stack
    assert plan([], 2, 1).seconds == 0


def test_an_estimate_says_how_long_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "calibrate", lambda *_, **__: Rates(step_seconds=2.0, seconds=1e-9, bytes=8.0))
    few, many = (estimator(measure=True).estimate(PlannedStack(RUNS[:count])) for count in (1, 24))
    assert few.full_seconds > 0
    assert many.full_seconds == pytest.approx(24 * few.full_seconds)
    fixed = 2.0 * RUNS[0].steps
    assert (few.seconds, many.seconds) == (fixed + few.full_seconds, fixed + many.full_seconds)
