"""Compare the runs of a GPU sweep with the slow path: their first steps, retrained on a CPU in float32.

Of each method the draws of least work are taken, with all their held-out environments. Rounding makes single runs drift
apart, so the test is that of `fast_path`, paired by run, at all checkpoints that the records have; and, of all methods
together, of the mean over checkpoints. Two controls tell what drifting apart does to that, and what precision does: the
same runs on the CPU, in plain torch, with learning rates a millionth larger; and in bfloat16.

python -m benchmarks.swept [RECORDS...]             # with both controls
python -m benchmarks.swept RECORDS trial=2          # one trial, without controls
python -m benchmarks.swept RECORDS name=variants draws=1
python -m benchmarks.swept together RECORDS...      # all runs of which a slow one is kept; RECORDS:2 takes trial 2 only
python -m benchmarks.swept train PRECISION FILE     # first train those runs of the sweep again, on a GPU

Runs trained on a CPU are kept in results/swept, under the name that is given; missing ones are trained, which takes an
hour on two cores, and can be interrupted.
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
    """A run of the sweep as the slow path has it."""
    return replace(spec, steps=STEPS, precision="fp32")


def nudged(spec: RunSpec) -> RunSpec:
    """The same with a learning rate that is a millionth larger."""
    return replace(slow(spec), hparams={**spec.hparams, "lr": spec.hparams["lr"] * (1 + 1e-6)})


def in_bfloat16(spec: RunSpec) -> RunSpec:
    """The same in half precision."""
    return replace(slow(spec), precision="bf16")


CONTROLS: dict[str, Callable[[RunSpec], RunSpec]] = {"nudged": nudged, "bf16": in_bfloat16}


def lightest(runs: Iterable[RunRecord], draws: int) -> list[list[RunRecord]]:
    """All runs of the draws of least work; the default one, which is shared by the trials, is not among them."""
    by_draw: defaultdict[tuple[int, int], list[RunRecord]] = defaultdict(list)
    for run in runs:
        by_draw[run.spec.trial_seed, run.spec.hparams_seed].append(run)
    dataset = load_dataset("Spirals")
    drawn = (group for (_, draw), group in by_draw.items() if draw)
    return sorted(drawn, key=lambda group: work_of(group[0].spec, dataset).step)[:draws]


def _fewer(run: RunRecord) -> RunRecord:
    """Accuracies at some checkpoints, without training curves."""
    return replace(run.at(every(run, EVERY)), metrics={})


def trained(name: str, stacks: Sequence[list[RunSpec]]) -> dict[str, RunRecord]:
    """Runs by their ids, from the file of this name; missing ones are trained and put there."""
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
    """Accuracies of the steps that all have, where runs were trained and where they were not."""
    steps = range(0, STEPS, EVERY)
    kept = [(run, np.searchsorted(run.steps, steps)) for run in runs]
    return {
        "trained on": np.stack([run.accuracy_out[rows][:, run.train_envs].mean(1) for run, rows in kept]),
        "held out": np.stack([run.accuracy_in[rows, run.spec.test_envs[0]] for run, rows in kept]),
    }


def by_method(swept: Mapping[str, Sequence[RunRecord]], alone: Mapping[str, RunRecord]) -> list[tuple[str, ...]]:
    """The test of each method."""
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
    """By how much runs are above the slow ones, and how probable that is: the mean of each environment held out."""
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
    """The differences to the slow runs, of all methods and of each: of the swept ones, and of the controls."""
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
    """The runs that are compared, by method and draw."""
    found: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for run in (run for file in records for run in read_runs(file)):
        if trial in (None, run.spec.trial_seed):
            found[run.spec.algorithm].append(run)
    return {method: lightest(runs, draws) for method, runs in found.items()}


def train_again(precision: str, file: Path) -> None:
    """Train the runs that are compared as stacks on a GPU; `file` is written after every method."""
    done: list[RunRecord] = []
    for method, groups in draws_of(RECORDS).items():
        for group in groups:
            runs = train([replace(run.spec, steps=STEPS, precision=precision) for run in group], "cuda")
            done += map(_fewer, runs)
        write_archive(done, file)
        print(f"{method}: {len(done)} runs in {file}", flush=True)


def together(records: Sequence[str]) -> None:
    """The difference of all runs of which a slow one is kept."""
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
