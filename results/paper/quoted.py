"""Numbers that the pages on the paper quote beyond those of their tables: python results/paper/quoted.py.

Computes them from the archives in results/ and writes results/paper/quoted.md. `sandmask paper pages` copies them into
the pages, and a test compares the file with the archives.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sandmask.paper import AVERAGE, algorithms, inconsistencies, printed
from sandmask.paper._select import averages, by_rule, trial_choices, validation
from sandmask.paper.figure_2_runs import is_search
from sandmask.paper.pages import look_up
from sandmask.paper.tables import is_untrained, read_all
from sandmask.paper.why_spirals import follows_spiral
from sandmask.records import RunRecord
from sandmask.reports.statistics import paired_comparison
from sandmask.sweeps import SweepSpec, expand, read_sweep

RESULTS = Path(__file__).parents[1]
FILE = RESULTS / "paper" / "quoted.md"
MEAN, WORST, ORACLE = "training-domain", "worst-training-domain", "oracle"
SAND = ("SANDMask", "SANDMask-released")
METHODS = ("ERM", "IRM", "ANDMask", "ANDMask-rescaled", "SANDMask", "SANDMask-released", "SANDMask-rescaled")
TABLE_3 = ("paper/spirals", "paper/spirals_variants")
REDUCED = ("spirals_reduced", "spirals_variants_reduced")  # the same runs in reduced precision
IMAGE_SETS = {"VLCS": "vlcs", "PACS": "pacs_resnet50", "OfficeHome": "office_home"}
IMAGE_SETS |= {"TerraIncognita": "terra_incognita", "DomainNet": "domain_net"}
Cells = NDArray[np.float64]
Rows = Iterator[Sequence[str]]


@cache
def archive(name: str) -> list[RunRecord]:
    """The runs of an archive in results/."""
    return list(read_all([RESULTS / f"{name}.records.parquet"]))


def of(method: str, *names: str) -> list[RunRecord]:
    """The runs of one method, in archives or else in Table 3."""
    found = (run for name in names or TABLE_3 for run in archive(name))
    return [run for run in found if run.spec.algorithm == method]


def rows_of(file: str) -> list[dict[str, str]]:
    """The rows of a CSV file in results/paper."""
    with (RESULTS / "paper" / file).open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def held_out(run: RunRecord, index: int = -1) -> float:
    """Accuracy on the environment held out, in percent."""
    return float(100 * run.accuracy_in[index, run.spec.test_envs[0]])


def on_zero(run: RunRecord) -> Cells:
    """Accuracy on environment 0's examples that are not trained on, in percent, at each checkpoint."""
    return np.asarray(100 * run.accuracy_out[:, 0], dtype=np.float64)


def seeds_of(run: RunRecord) -> tuple[int, int]:
    """Trial and draw."""
    return run.spec.trial_seed, run.spec.hparams_seed


def best(run: RunRecord) -> int:
    """The checkpoint with the highest validation accuracy."""
    return int(validation(run).argmax())


def choices(runs: Iterable[RunRecord], rule: str) -> Cells:
    """Accuracies of the selected runs on Spirals: trials (rows) and 16 environments."""
    picks = trial_choices(list(runs), by_rule(rule))
    cells = {(key.trial_seed, key.test_env): pick.test_accuracy for key, pick in picks.items()}
    return np.array([[100 * cells[trial, environment] for environment in range(16)] for trial in range(3)])


def row(trials: Cells) -> str:
    """Mean and standard error over trials."""
    return f"{trials.mean():.1f} ± {trials.std() / len(trials) ** 0.5:.1f}"


def difference(one: Cells, other: Cells) -> tuple[str, str]:
    """The mean difference of 16 environments with its standard error, and the p-value of a sign-flip test."""
    gain = one.mean(0) - other.mean(0)
    p = paired_comparison(list(one.mean(0)), list(other.mean(0))).p_value
    return f"{gain.mean():+.1f} ± {gain.std(ddof=1) / 4:.1f}", f"{p:.3f}"


def listed(values: Iterable[float], digits: int = 1) -> str:
    """Numbers as words: 1.0, 2.0 and 3.0."""
    *some, last = [f"{value:.{digits}f}" for value in values]
    return f"{', '.join(some)} and {last}"


def span(values: Iterable[float], digits: int = 0) -> str:
    """The smallest and the largest of some numbers."""
    values = list(values)
    return f"{min(values):,.{digits}f} to {max(values):,.{digits}f}"


def spirals() -> Rows:
    """Of Table 3."""
    cells = [cell for cell in rows_of("table-3.csv") if cell["environment"] != AVERAGE]
    for rule in (MEAN, ORACLE):
        for verdict in ("within", "beyond"):
            count = sum((cell["selection"], cell["verdict"]) == (rule, verdict) for cell in cells)
            yield f"cells {verdict}, {rule}", f"{count} of {len(cells) // 2}"
    yield "ERM and IRM, highest on environment 0", f"{max(on_zero(r).max() for m in ('ERM', 'IRM') for r in of(m)):.1f}"
    printed, rescaled = (choices(of(method), MEAN) for method in ("ANDMask", "ANDMask-rescaled"))
    yield "ANDMask, trials", listed(printed.mean(1))
    yield "ANDMask-rescaled, trials", listed(rescaled.mean(1))
    gain, p = difference(rescaled, printed)
    yield "rescaling the AND-mask adds", gain.removeprefix("+")
    yield "rescaling the AND-mask adds, p", p
    ends = [held_out(run) for run in of("ERM") if run.spec.test_envs in ((1,), (14,))]
    yield "ERM, ends above 60% on environments 1 and 14", f"{sum(end > 60 for end in ends)} of {len(ends)}"


def defaults() -> Rows:
    """Of the rescaled AND-mask with its default hyperparameters, draw 0."""
    runs = [run for run in of("ANDMask-rescaled") if run.spec.hparams_seed == 0]
    yield "defaults that follow the spiral", f"{sum(follows_spiral(r, best(r)) for r in runs)} of {len(runs)}"
    trials = [np.mean([held_out(r, best(r)) for r in runs if r.spec.trial_seed == trial]) for trial in range(3)]
    yield "defaults alone, trials", listed(float(trial) for trial in trials)
    plain = [validation(run).max() for run in of("ANDMask") if run.spec.hparams_seed == 0]
    yield "defaults without rescaling, highest validation accuracy", f"{100 * max(plain):.1f}"
    yield "defaults, environment 0 at the end", span(on_zero(run)[-1] for run in runs)
    leaving = [run for run in archive("spirals_leaving") if run.spec.hparams_seed == 0]
    there = [run for run in leaving if (on_zero(run) > 80).any()]
    yield "defaults that reach the spiral at some checkpoint", f"{len(there)} of {len(leaving)}"
    yield "step at which they reach it", span(float(run.steps[np.argmax(on_zero(run) > 80)]) for run in there)
    losses = [run.metrics["loss"] for run in leaving]
    yield "defaults, lowest loss (median)", f"{np.median([x.min() for x in losses]):.3f}"
    yield "defaults, last loss (median)", f"{np.median([x[-1] for x in losses]):.0f}"
    for method in ("ANDMask", "ANDMask-rescaled"):
        for trial, draw in ((1, 10), (2, 15)):
            key = (method, trial, draw)
            runs = [r for r in archive("spirals_leaving") if (r.spec.algorithm, *seeds_of(r)) == key]
            last = np.median([run.metrics["loss"][-1] for run in runs])
            yield f"{method}, draw {draw} of trial {trial}, last loss (median)", f"{last:.2f}"
    cpu = archive("spirals_defaults")
    yield "defaults on a CPU that follow the spiral", f"{sum(follows_spiral(r, best(r)) for r in cpu)} of {len(cpu)}"


def worst_environment() -> Rows:
    """Selection by the worst training environment against selection by the mean."""
    yield "method", MEAN, WORST, "difference", "p"
    for method in METHODS:
        mean, worst = (choices(of(method), rule) for rule in (MEAN, WORST))
        yield method, row(mean.mean(1)), row(worst.mean(1)), *difference(worst, mean)


def worst_environment_on_digits() -> Rows:
    """The same on the parts of the MNIST sweeps."""
    for name, count in (("colored_mnist", 3), ("rotated_mnist", 6)):
        runs = archive(f"paper/{name}")
        mean, worst = (averages(trial_choices(runs, by_rule(rule)), count) for rule in (MEAN, WORST))
        gains = [one[0] - other[0] for one, other in zip(worst.values(), mean.values(), strict=True) if one and other]
        yield f"worst minus mean, {name}, six methods", f"{min(gains):+.1f} to {max(gains):+.1f}"


def two_passes() -> Rows:
    """The SAND-mask rows that were trained twice."""
    yield "method", "selection", "first: trials", "first pass", "second: trials", "second pass", "difference", "p"
    for method in SAND:
        for rule in (MEAN, ORACLE):
            first, second = (choices(of(method, *names), rule) for names in (["spirals_first_pass"], REDUCED))
            passes = [word for cells in (first, second) for word in (listed(cells.mean(1)), row(cells.mean(1)))]
            yield method, rule, *passes, *difference(second, first)


def in_both_precisions() -> Rows:
    """The runs that were trained in reduced precision and in `fp32x3`."""
    yield "method", "selection", "reduced precision", "`fp32x3`", "difference", "p"
    for method in METHODS:
        for rule in (MEAN, ORACLE):
            before, now = (choices(of(method, *names), rule) for names in (REDUCED, TABLE_3))
            yield method, rule, row(before.mean(1)), row(now.mean(1)), *difference(now, before)


def smaller_steps() -> Rows:
    """Six runs of the rescaled AND-mask's defaults with smaller learning rates."""
    smaller = archive("spirals_smaller_steps")
    envs = {run.spec.test_envs for run in smaller}
    same = [r for r in archive("spirals_leaving") if seeds_of(r) == (0, 0) and r.spec.test_envs in envs]
    ends = ("follow it at step 2,000", "held out at step 2,000")
    yield "learning rate", "follow the spiral at best", "held out then", *ends
    for rate in (0.01, 0.003, 0.001):
        runs = [run for run in [*same, *smaller] if run.spec.hparams["lr"] == rate]
        words = []
        for places in ([best(run) for run in runs], [int(np.searchsorted(run.steps, 2000)) for run in runs]):
            pairs = list(zip(runs, places, strict=True))
            words.append(f"{sum(follows_spiral(*pair) for pair in pairs)} of {len(runs)}")
            words.append(f"{np.mean([held_out(*pair) for pair in pairs]):.1f}")
        yield f"{rate:g}", *words


def colored() -> Rows:
    """Of ColoredMNIST."""
    runs = archive("paper/colored_mnist")
    last = [r for r in runs if r.spec.test_envs == (2,) and not is_untrained(r)]
    ends = [held_out(run) for run in last if run.spec.algorithm not in ("IRM", "VREx")]
    yield "trained runs of ERM and masks with -90% held out", f"{len(ends)}"
    yield "their highest accuracy on -90%", f"{max(ends):.1f}"
    for method in ("ERM", "ANDMask", *SAND):
        mine = [
            r for r in of(method, "paper/colored_mnist") if r.spec.test_envs in ((0,), (1,)) and not is_untrained(r)
        ]
        trained = [100 * run.accuracy_in[-1, list(run.train_envs)].mean() for run in mine]
        yield f"{method}, last checkpoint, training examples", f"{np.mean(trained):.1f}"
        yield f"{method}, last checkpoint, held out", f"{np.mean([held_out(run) for run in mine]):.1f}"


def untrained() -> Rows:
    """The networks that the default draw of the SAND-masks leaves as initialized."""
    yield "method", "held out", "trial", "+90%", "+80%", "-90%"
    for run in archive("paper/colored_mnist"):
        if is_untrained(run):
            numbers = [f"{100 * value:.1f}" for value in run.accuracy_in[-1]]
            yield run.spec.algorithm, run.env_names[run.spec.test_envs[0]], str(run.spec.trial_seed), *numbers


def penalties() -> Rows:
    """The runs of IRM and VREx that the oracle selects with -90% held out."""
    yield "method", "trial", "penalty weight", "from step", "+90%", "+80%", "-90%"
    picks = trial_choices(archive("paper/colored_mnist"), by_rule(ORACLE))
    for key, pick in sorted(picks.items(), key=lambda item: (item[0].method, item[0].trial_seed)):
        if key.method in ("IRM", "VREx") and key.test_env == 2:
            own = {name.partition("_")[2]: value for name, value in pick.run.spec.hparams.items()}
            start = f"{own['penalty_anneal_iters']:.0f}"
            numbers = [f"{100 * value:.1f}" for value in pick.run.accuracy_in[pick.index]]
            yield key.method, str(key.trial_seed), f"{own['lambda']:,.0f}", start, *numbers


def rotated() -> Rows:
    """Of RotatedMNIST."""
    runs = archive("paper/rotated_mnist")
    found = averages(trial_choices([run for run in runs if run.spec.hparams_seed], by_rule(MEAN)), 6)
    for method, average in found.items():
        yield f"{method} without draw 0", f"{average[0]:.1f}" if average else "-"
    rates = {run.spec.hparams_seed: run.spec.hparams["lr"] for run in runs}
    yield "learning rate of draw 0", f"{rates[0]:g}"
    yield "largest learning rate of the other draws", f"{max(rate for draw, rate in rates.items() if draw):.5f}"


def figures() -> Rows:
    """Of Figures 1 and 2."""
    ends = [each for each in rows_of("figure-1-ends.csv") if float(each["momentum"]) == 0]
    by_mask = {(each["mask"], each["x"], each["y"]): each["end"] for each in ends}
    held = [place for (mask, *place), end in by_mask.items() if mask == "and-1" and end == "stopped"]
    yield "starts in the AND-mask's dead zone", f"{len(held)}"
    taken = sum(by_mask["erm", x, y] == "spurious" for x, y in held)
    yield "of these, starts that averaging takes to A's minimum", f"{taken}"
    runs = rows_of("figure-2-runs.csv")
    yield "Figure 2, runs", f"{sum(not is_search(run) for run in archive('paper/figure-2')):,}"
    yield "Figure 2, best run", f"{100 * max(float(run['test_accuracy']) for run in runs):.1f}"
    points = [(method, beta) for method in ("ANDMask", "SANDMask") for beta in ("0.0", "0.9")]
    for method, beta in [*points, ("ANDMask-rescaled", "0.9"), ("SANDMask-released", "0.9")]:
        mine = [r for r in runs if (r["panel"], r["value"], r["method"]) == ("momentum", beta, method)]
        trained = 100 * np.mean([float(run["train_accuracy"]) for run in mine])
        yield f"Figure 2, {method}, momentum {float(beta):g}, training environments", f"{trained:.0f}"
    gain = paired_comparison(*(seeds(runs, "noise", 0.2, method) for method in ("SANDMask", "ANDMask")))
    yield "Figure 2, noise 0.2, SANDMask - ANDMask", f"{gain.difference:+.1f}"
    yield "Figure 2, noise 0.2, SANDMask - ANDMask, p", f"{gain.p_value:.3f}"
    for method in ("ANDMask", "SANDMask"):
        lost = paired_comparison(seeds(runs, "noise", 0.0, method), seeds(runs, "noise", 0.05, method))
        yield f"Figure 2, {method} loses by noise 0.05", f"{lost.difference:.1f}"
        yield f"Figure 2, {method} loses by noise 0.05, p", f"{lost.p_value:.3f}"
    yield "Figure 2, ANDMask, seeds below 54%", f"{sum(x < 54 for x in seeds(runs, 'init', 1.0, 'ANDMask'))}"
    draws: dict[tuple[str, int], list[RunRecord]] = {}
    for run in filter(is_search, archive("paper/figure-2")):
        draws.setdefault((run.spec.algorithm, run.spec.hparams_seed), []).append(run)
    scores = {key: np.mean([held_out(run) for run in mine]) for key, mine in draws.items()}
    taus = [draws[key][0].spec.hparams["tau"] for key, score in scores.items() if score > 60]
    yield "Figure 2, tau of the draws above 60%", span(taus, 2)


def seeds(runs: list[dict[str, str]], panel: str, value: float, method: str) -> list[float]:
    """Accuracies of one point of Figure 2, in percent, by seed."""
    mine = [run for run in runs if (run["panel"], run["method"], float(run["value"])) == (panel, method, value)]
    return [100 * float(run["test_accuracy"]) for run in sorted(mine, key=lambda run: int(run["seed"]))]


def of_the_paper() -> Rows:
    """What the paper prints."""
    for rule in (MEAN, ORACLE):
        for method in ("SANDMask", "ANDMask"):
            yield f"all datasets, {method}, {rule}", f"{value_of(rule, AVERAGE, method)}"
    colored = [value_of(ORACLE, "ColoredMNIST", name) for name in algorithms()]
    above = sum(value > value_of(ORACLE, "ColoredMNIST", "SANDMask") for value in colored)
    yield "ColoredMNIST, methods above SANDMask, oracle", f"{above}"
    yield "averages that do not follow", f"{len(inconsistencies())}"
    yield "of these, not explained by rounding", f"{sum(not each.explained_by_rounding for each in inconsistencies())}"


def value_of(rule: str, dataset: str, method: str) -> float:
    """A printed mean; 0 where the paper prints none."""
    cell = printed(rule, dataset, method)
    return cell.mean if cell else 0.0


def costs() -> Rows:
    """Hours of one H200 for image datasets, from steps of ResNet-50 with three training environments."""
    yield "dataset", "runs", "hours", "hours with `--compile`"
    steps = []
    for row in ("Captured, not compiled / captured", "ResNet-50, PACS / on the device; compiled + captured"):
        erm, mask = (float(look_up(RESULTS, f"h200/image_step / {row} / {name} ms")) for name in ("ERM", "SAND-mask"))
        steps.append((erm + 3 * mask) / 4)  # ERM and three masks
    for name, config in IMAGE_SETS.items():
        runs = len(expand(SweepSpec(**read_sweep(RESULTS / "paper" / f"{config}.toml"))).runs)
        share = 5 / 3 if name == "DomainNet" else 1.0
        yield name, f"{runs:,}", *(f"{runs * 5001 * step / 1000 * share / 3600:.0f}" for step in steps)


def section(title: str, rows: Iterable[Sequence[str]], *, named: bool = True) -> str:
    """A heading and a table; `named` rows are pairs of a name and a value, others bring their own heading."""
    lines = [("what", "value"), *rows] if named else list(rows)
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"## {title}", "", head, "|---" * len(lines[0]) + "|", *body, ""])


def numbers() -> str:
    """The text of quoted.md."""
    parts = [
        "# Numbers that the pages quote\n\nMade by `python results/paper/quoted.py`. Accuracies are in percent.\n",
        section("Table 3", [*spirals(), *defaults(), *worst_environment_on_digits()]),
        section("Selection by the worst training environment", worst_environment(), named=False),
        section("Two passes", two_passes(), named=False),
        section("Two precisions", in_both_precisions(), named=False),
        section("Smaller learning rates", smaller_steps(), named=False),
        section("ColoredMNIST", colored()),
        section("Untrained networks", untrained(), named=False),
        section("IRM and VREx", penalties(), named=False),
        section("RotatedMNIST", rotated()),
        section("Figures 1 and 2", figures()),
        section("Printed in the paper", of_the_paper()),
        section("Cost", costs(), named=False),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(numbers(), encoding="utf-8")
    print(f"Wrote {FILE}.")
