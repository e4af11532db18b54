"""Compare selection rules on records: python results/diagnostics/compare.py FILE.records.parquet [--figure OUT.png].

Prints the tables and numbers of docs/diagnostics.md and results/diagnostics/README.md. `--tables` writes tables to a
file; `sandmask paper pages` copies them from results/diagnostics/tables.md into the page. The rules are in the package.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sandmask.records import RunRecord, read_runs
from sandmask.selection import RULES, GroupKey, Selected, group_runs, has_common_signal, select, signal_threshold

SHOWN = ("training-domain", "worst-training-domain", "leave-one-domain-out", "oracle", "common-signal")
OURS = "common-signal"
Trials = Mapping[GroupKey, Mapping[str, Selected | None]]


def choose(runs: Sequence[RunRecord]) -> Trials:
    """What each rule takes, for every held-out environment, method and trial."""
    chosen = {
        key: {rule: select(RULES[rule], group, key.test_env) for rule in SHOWN}
        for key, group in group_runs(runs).items()
    }
    return {key: row for key, row in chosen.items() if row["oracle"]}


def table(trials: Trials, names: Sequence[str]) -> Iterator[str]:
    """A table in Markdown: mean and standard error over trials, and how many where a rule did not always choose."""
    rules = [rule for rule in SHOWN if any(row[rule] for row in trials.values())]
    yield f"| held out | method | {' | '.join(rules)} |"
    yield f"|---|---|{'---|' * len(rules)}"
    for env, method in sorted({(key.test_env, key.method) for key in trials}):
        rows = [row for key, row in trials.items() if (key.test_env, key.method) == (env, method)]
        yield f"| {names[env]} | {method} | " + " | ".join(_cell([row[rule] for row in rows]) for rule in rules) + " |"


def tables(files: Iterable[Path]) -> str:
    """The tables of several files, each below a heading with its name."""
    parts = ["# Selection rules, compared\n\nMade by `python results/diagnostics/compare.py FILES --tables`."]
    for file in files:
        runs = read_runs(file)
        lines = "\n".join(table(choose(runs), runs[0].env_names))
        parts.append(f"## {file.name.removesuffix('.records.parquet')}\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def _cell(chosen: Sequence[Selected | None]) -> str:
    values = [100 * each.test_accuracy for each in chosen if each]
    if not values:
        return "- (0)"
    count = "" if len(values) == len(chosen) else f" ({len(values)})"
    error = f" ± {np.std(values) / np.sqrt(len(values)):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{error}{count}"


def together(trials: Trials, names: Sequence[str]) -> Iterator[str]:
    """Each rule's mean accuracy and its regret, over the trials in which `common-signal` chose something."""
    envs = tuple(sorted({key.test_env for key in trials}))
    for some in dict.fromkeys([*((env,) for env in envs), envs]):
        judged = [row for key, row in trials.items() if key.test_env in some and row[OURS]]
        rows = [{rule: 100 * each.test_accuracy for rule, each in row.items() if each} for row in judged]
        yield f"held out {', '.join(names[env] for env in some)}: {len(rows)} trials"
        for rule in SHOWN:
            both = np.array([(row[rule], row[OURS], row["oracle"]) for row in rows if rule in row])
            if len(both):
                accuracy, ours, oracle = both.T
                yield (
                    f"  {rule:21} accuracy {accuracy.mean():5.1f}, regret {np.mean(oracle - accuracy):5.1f}; "
                    f"{OURS} is above it in {np.sum(ours > accuracy)}, below in {np.sum(ours < accuracy)}"
                )


def worth(trials: Trials) -> str:
    """What `common-signal` takes is worth: many of its checkpoints have not learned anything."""
    taken = [each for row in trials.values() if (each := row[OURS])]
    coin = sum(each.validation <= 0.505 for each in taken)
    ends = sum(each.index in (0, len(each.run.steps) - 1) for each in taken)
    return f"{len(taken)} choices: {coin} at a likelihood of 0.505 or less, {ends} at a run's first or last evaluation"


def stopping(runs: Iterable[RunRecord]) -> str:
    """Rules as stopping rules: accuracy at the checkpoint of each run that has a candidate."""
    rows = []
    for run in runs:
        held_out = 100 * run.accuracy_in[:, run.spec.test_envs[0]]
        ours, usual = (RULES[rule].choose(run, ()) for rule in (OURS, "training-domain"))
        if ours and usual:
            rows.append((held_out[ours.index], held_out[usual.index], held_out[-1], held_out.max()))
    if not rows:
        return "no run has a candidate"
    ours_, usual_, last, best = np.mean(rows, axis=0)
    return f"{len(rows)} runs: {OURS} {ours_:.1f}, training-domain {usual_:.1f}, last {last:.1f}, best {best:.1f}"


def kinds(run: RunRecord) -> dict[str, NDArray[np.bool_]]:
    """Checkpoints that live on what the held-out environment has not, those that are good there, and the others."""
    held_out = run.accuracy_in[:, run.spec.test_envs[0]]
    worse = run.accuracy_in[:, run.train_envs].mean(axis=1) - held_out > 0.25
    good = (held_out > 0.6) & ~worse
    return {"neither": ~worse & ~good, "25 points worse than in training": worse, "over 60%": good}


def separation(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Quartiles of what the environments have in common, by kind of checkpoint; and how many are candidates."""
    for kind in kinds(runs[0]):
        masks = [kinds(run)[kind] for run in runs]
        count = sum(int(mask.sum()) for mask in masks)
        taken = sum(int((mask & has_common_signal(run)).sum()) for mask, run in zip(masks, runs, strict=True))
        within = sum(bool(mask.any()) for mask in masks)
        line = f"  {kind}: {count} checkpoints in {within} runs, {taken} candidates"
        for name in ("held_out_coherence", "held_out_agreement") if count else ():
            values = np.concatenate([run.metrics[name][mask] for run, mask in zip(runs, masks, strict=True)])
            line += f"; {name} {' / '.join(f'{each:.3f}' for each in np.nanpercentile(values, [25, 50, 75]))}"
        yield line


def draw(panels: Mapping[str, Sequence[RunRecord]], path: Path) -> None:
    """Every checkpoint's coherence and accuracy on the held-out environment, with the threshold of the rule."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.6), sharey=True, squeeze=False)
    for axis, (title, runs) in zip(axes[0], panels.items(), strict=True):
        for colour, kind in zip(("#b8b8b0", "#a34c12", "#2f6ea5"), kinds(runs[0]), strict=True):
            masks = [kinds(run)[kind] for run in runs]
            held_out = [run.accuracy_in[:, run.spec.test_envs[0]] for run in runs]
            x = [run.metrics["held_out_coherence"][mask] for run, mask in zip(runs, masks, strict=True)]
            y = [100 * accuracy[mask] for accuracy, mask in zip(held_out, masks, strict=True)]
            axis.plot(np.concatenate(x), np.concatenate(y), ".", color=colour, markersize=3, label=kind)
        axis.axvline(signal_threshold(len(runs[0].train_envs)), color="black", linestyle="--", linewidth=1)
        axis.set(title=title, xlabel="held-out coherence", xscale="log", ylim=(-2, 102))
    axes[0, 0].set_ylabel("accuracy on the held-out environment, %")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, markerscale=4, loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=130)


def main() -> None:
    """Print everything about files of records: tables of each, then checkpoints of all of them together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--held-out", metavar="=A,B", default="", help="only these environments in the picture")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--tables", type=Path, help="write the tables to this file")
    options = parser.parse_args()
    if options.tables:
        options.tables.write_text(tables(options.files), encoding="utf-8")
    panels: dict[str, list[RunRecord]] = {}
    for file in options.files:
        runs = read_runs(file)
        names, trials = runs[0].env_names, choose(runs)
        print(f"## {file.name}", "", *table(trials, names), "", *together(trials, names), worth(trials), sep="\n")
        for run in sorted(runs, key=lambda run: run.spec.test_envs):
            if len(run.spec.test_envs) == 1:
                panels.setdefault(f"{run.spec.dataset}, {names[run.spec.test_envs[0]]} held out", []).append(run)
    print("## All files")
    for title, here in panels.items():
        print(title, *separation(here), sep="\n")
        for method in sorted({run.spec.algorithm for run in here}):
            print(f"  stopping, {method}: {stopping(run for run in here if run.spec.algorithm == method)}")
    if options.figure:
        wanted = tuple(f", {name} held out" for name in options.held_out.split(",")) if options.held_out else ""
        draw({title: here for title, here in panels.items() if title.endswith(wanted)}, options.figure)


if __name__ == "__main__":
    main()
