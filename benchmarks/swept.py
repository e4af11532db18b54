"""Compare the runs of a GPU sweep with the slow path: their first steps, retrained on a CPU in float32.

Of each method, the draws of least work are compared, with all their held-out environments. Rounding makes single runs
drift apart, so the test is that of `fast_path`, paired by run, at all checkpoints in the records. For all methods
together, the mean over checkpoints is tested. Two controls show the effects of drifting apart and of precision: the
same runs on the CPU in plain torch, with learning rates that are a millionth larger, and in bfloat16.

python -m benchmarks.swept [RECORDS...]             # with both controls
python -m benchmarks.swept RECORDS trial=2          # one trial, without controls
python -m benchmarks.swept RECORDS name=variants draws=1
python -m benchmarks.swept together RECORDS...      # all runs with a stored slow run; RECORDS:2 takes trial 2 only
python -m benchmarks.swept train PRECISION FILE     # train the same runs of the sweep again, on a GPU

Runs that were trained on a CPU are stored in results/swept under the given name. Missing runs are trained, which takes
an hour on two cores and can be interrupted.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks._measure import print_rows
from benchmarks.fast_path import Curves, p_value, train, trained_apart
from sandmask._text import counted
from sandmask.datasets import load_dataset
from sandmask.paper._select import every
from sandmask.records import RunRecord, RunSpec, read_runs, write_archive
from sandmask.reports.statistics import paired_comparison
from sandmask.sweeps._cost import work_of

RECORDS = tuple(f"results/paper/{name}.records.parquet" for name in ("spirals", "spirals_variants"))
KEPT = Path("results/swept")
DRAWS, STEPS, EVERY = 3, 1001, 50


def slow(spec: RunSpec) -> RunSpec:
    """Return the spec of a run of the sweep for the slow path."""
    return replace(spec, steps=STEPS, precision="fp32")


def nudged(spec: RunSpec) -> RunSpec:
    """Return the same with a learning rate that is a millionth larger."""
    return replace(slow(spec), hparams={**spec.hparams, "lr": spec.hparams["lr"] * (1 + 1e-6)})


def in_bfloat16(spec: RunSpec) -> RunSpec:
    """Return the same in bfloat16."""
    return replace(slow(spec), precision="bf16")


CONTROLS: dict[str, Callable[[RunSpec], RunSpec]] = {"nudged": nudged, "bf16": in_bfloat16}


def lightest(runs: Iterable[RunRecord], draws: int) -> list[list[RunRecord]]:
    """Return all runs of the draws of least work, without the defaults (draw 0), which the trials share."""
    by_draw: defaultdict[tuple[int, int], list[RunRecord]] = defaultdict(list)
    for run in runs:
        by_draw[run.spec.trial_seed, run.spec.hparams_seed].append(run)
    dataset = load_dataset("Spirals")
    drawn = (group for (_, draw), group in by_draw.items() if draw)
    return sorted(drawn, key=lambda group: work_of(group[0].spec, dataset).step)[:draws]


def _fewer(run: RunRecord) -> RunRecord:
    """Keep the accuracies at some checkpoints, without training curves."""
    return replace(run.at(every(run, EVERY)), metrics={})


def trained(name: str, stacks: Sequence[list[RunSpec]]) -> dict[str, RunRecord]:
    """Return runs by their ids from the file of this name. Missing ones are trained and added to it."""
    file = KEPT / f"{name}.records.parquet"
    found = {run.spec.id: run for run in read_runs(file)} if file.exists() else {}
    missing = [stack for stack in stacks if any(spec.id not in found for spec in stack)]
    KEPT.mkdir(parents=True, exist_ok=True)
    for runs in trained_apart(missing):
        found |= {run.spec.id: _fewer(run) for run in runs}
        write_archive(list(found.values()), file)
        print(f"{file}: {len(found)} runs", file=sys.stderr, flush=True)
    return found


def curves(runs: Iterable[RunRecord]) -> dict[str, Curves]:
    """Return accuracies at the steps that all runs have, on training environments and on the held-out one."""
    steps = range(0, STEPS, EVERY)
    kept = [(run, np.searchsorted(run.steps, steps)) for run in runs]
    return {
        "trained on": np.stack([run.accuracy_out[rows][:, run.train_envs].mean(1) for run, rows in kept]),
        "held out": np.stack([run.accuracy_in[rows, run.spec.test_envs[0]] for run, rows in kept]),
    }


def by_method(swept: Mapping[str, Sequence[RunRecord]], alone: Mapping[str, RunRecord]) -> list[tuple[str, ...]]:
    """Test each method."""
    rows: list[tuple[str, ...]] = [("method", "precision", "runs", "where", "slow", "swept", "largest difference", "p")]
    for method, runs in swept.items():
        again = [alone[slow(run.spec).id] for run in runs]
        for (where, one), other in zip(curves(again).items(), curves(runs).values(), strict=True):
            largest, p = p_value(one, other)
            means = (f"{100 * each.mean():.2f}" for each in (one, other))
            numbers = (*means, f"{100 * largest:.2f}", f"{p:.3f}")
            rows.append((method, runs[0].spec.precision, str(len(runs)), where, *numbers))
    return rows


def exceeding(runs: Sequence[RunRecord], alone: Sequence[RunRecord]) -> dict[str, tuple[str, str]]:
    """Return by how much runs exceed the slow ones, over means of the held-out environments, with p-values."""
    environment = np.array([run.spec.test_envs[0] for run in runs])
    found = {}
    for (where, one), other in zip(curves(alone).items(), curves(runs).values(), strict=True):
        gap = 100 * (other - one).mean(1)
        means = [float(gap[environment == number].mean()) for number in np.unique(environment)]
        difference = f"{np.mean(means):+.2f} ± {np.std(means, ddof=1) / len(means) ** 0.5:.2f}"
        found[where] = (difference, f"{paired_comparison(means, [0.0] * len(means)).p_value:.3f}")
    return found


def by_control(
    swept: Mapping[str, Sequence[RunRecord]],
    alone: Mapping[str, RunRecord],
    controls: Mapping[str, Mapping[str, RunRecord]],
) -> list[tuple[str, ...]]:
    """Return differences to the slow runs, for all methods and for each: of the sweep and of the controls."""
    names = ("swept", *controls)
    rows: list[tuple[str, ...]] = [("method", "runs", "where", *(f"{name}{p}" for name in names for p in ("", ", p")))]
    everything = [run for runs in swept.values() for run in runs]
    for method, runs in {"all": everything, **swept}.items():
        again = [alone[slow(run.spec).id] for run in runs]
        others = [[found[CONTROLS[name](run.spec).id] for run in runs] for name, found in controls.items()]
        sets = [exceeding(each, again) for each in (runs, *others)]
        rows += [(method, str(len(runs)), where, *(cell for each in sets for cell in each[where])) for where in sets[0]]
    return rows


def draws_of(records: Sequence[str], trial: int | None = None, draws: int = DRAWS) -> dict[str, list[list[RunRecord]]]:
    """Return the runs to compare, by method and draw."""
    found: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for run in (run for file in records for run in read_runs(file)):
        if trial in (None, run.spec.trial_seed):
            found[run.spec.algorithm].append(run)
    return {method: lightest(runs, draws) for method, runs in found.items()}


def train_again(precision: str, file: Path) -> None:
    """Train the runs to compare as stacks on a GPU. `file` is written after every method."""
    done: list[RunRecord] = []
    for method, groups in draws_of(RECORDS).items():
        for group in groups:
            runs = train([replace(run.spec, steps=STEPS, precision=precision) for run in group], "cuda")
            done += map(_fewer, runs)
        write_archive(done, file)
        print(f"{method}: {len(done)} runs in {file}", flush=True)


def together(records: Sequence[str]) -> None:
    """Print the difference over all runs with a stored slow run."""
    alone = {run.spec.id: run for file in sorted(KEPT.glob("slow*.parquet")) for run in read_runs(file)}
    runs = []
    for file, _, trial in (word.partition(":") for word in records):
        runs += [
            run for run in read_runs(file) if trial in ("", str(run.spec.trial_seed)) and slow(run.spec).id in alone
        ]
    rows: list[tuple[str, ...]] = [("methods", "runs", "where", "swept", "swept, p")]
    methods, found = (
        str(len({run.spec.algorithm for run in runs})),
        exceeding(runs, [alone[slow(r.spec).id] for r in runs]),
    )
    rows += [(methods, str(len(runs)), where, *cells) for where, cells in found.items()]
    print_rows("All runs minus the slow ones, paired by the environment held out", rows)


def main() -> None:
    if sys.argv[1:2] == ["together"]:
        together(sys.argv[2:])
        return
    if sys.argv[1:2] == ["train"]:
        train_again(sys.argv[2], Path(sys.argv[3]))
        return
    options = dict(word.split("=") for word in sys.argv[1:] if "=" in word)
    records = [word for word in sys.argv[1:] if "=" not in word]
    trial, count = int(options["trial"]) if "trial" in options else None, int(options.get("draws", DRAWS))
    name = options.get("name") or ("" if trial is None else f"trial_{trial}")
    draws = draws_of(records or RECORDS, trial, count)
    swept = {method: [run for group in groups for run in group] for method, groups in draws.items()}
    stacks = [[run.spec for run in group] for groups in draws.values() for group in groups]
    alone = trained("_".join(filter(None, ("slow", name))), [[slow(spec)] for stack in stacks for spec in stack])
    title = f"Spirals, the first {STEPS} steps of {counted(count, 'draw')}: accuracy in %, mean over checkpoints"
    print_rows(title, by_method(swept, alone))
    chosen = {} if name else CONTROLS
    controls = {
        each: trained(each, [[how(spec) for spec in stack] for stack in stacks]) for each, how in chosen.items()
    }
    print_rows("Minus the slow ones, paired by the environment held out", by_control(swept, alone, controls))


if __name__ == "__main__":
    main()
