"""The tables of the page "Masks that work", in Markdown: `python results/recipe/table.py`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from maps import CHANGES

from sandmask.records import RunRecord, read_runs, split_averages
from sandmask.selection import RULES, select

HERE = Path(__file__).parent
DATA = {"fresh data, seed 1": "spirals-seed-1", "fresh data, seed 2": "spirals-seed-2", "published data": "spirals"}
METHODS = {
    "ERM": "ERM",
    "IRM": "IRM",
    "AND-mask": "ANDMask",
    "AND-mask, rescaled": "ANDMask-rescaled",
    "SAND-mask": "SANDMask",
    "SAND-mask, rescaled": "SANDMask-rescaled",
    "SAND-mask, released": "SANDMask-released",
    "Geometric mean": "GeometricMean",
}
RECIPE = {
    "rescale": 1, "weight_decay": 3e-4, "decoupled_decay": 0.0, "batch_size": 512, "dropout": 0.0, "tau": 0.9,
    "lr_final": 0.0, "adam_beta1": 0.9, "average": None, "precision": "tf32",
}  # fmt: skip
CHANGED: dict[str, dict[str, object]] = {
    **CHANGES,
    "averaged weights (SMA)": {"average": "sma"},
    "float32 instead of TF32": {"precision": "fp32"},
    "bfloat16": {"precision": "bf16"},
    "float16": {"precision": "fp16"},
}
FORGETTING = {
    "AND-mask, weight decay in Adam's gradient (the recipe)": ("ANDMask", 3e-4),
    "AND-mask, no weight decay": ("ANDMask", 0.0),
    "AND-mask that forgets": ("ForgettingANDMask", 0.0),
    "SAND-mask that forgets": ("ForgettingSANDMask", 0.0),
    "AND-mask that forgets, without the memory of openings": ("ForgettingANDMask-at-once", 0.0),
    "AND-mask that forgets, at a constant rate": ("ForgettingANDMask-to-zero", 0.0),
}
WATERMARKED = ("ERM", "IRM", "VREx", "GroupDRO", "CORAL", "Fishr", "ANDMask", "SANDMask")
SHORT = {"ANDMask": "AND-mask", "SANDMask": "SAND-mask"}
IMAGES = {"ColoredMNIST": 3, "RotatedMNIST": 6, "PACS": 4}  # and how many environments each has


def accuracies(runs: Sequence[RunRecord], rule: str, n_envs: int = 16) -> np.ndarray:
    """Accuracy in percent for every trial and held-out environment, [trials, n_envs]."""
    trials = sorted({run.spec.trial_seed for run in runs})
    rows = []
    for trial in trials:
        own = [run for run in runs if run.spec.trial_seed == trial]
        mine = [[run for run in own if run.spec.test_envs == (e,)] for e in range(n_envs)]
        rows.append([select(RULES[rule], some, e).test_accuracy for e, some in enumerate(mine)])  # type: ignore[union-attr]
    return 100.0 * np.array(rows)


def cell(runs: Sequence[RunRecord], rule: str, n_envs: int = 16) -> str:
    """`99.9 ± 0.0`: the mean over environments and trials, and its standard error over trials."""
    if not runs:
        return "-"
    means = accuracies(runs, rule, n_envs).mean(axis=1)
    error = f" ± {means.std() / np.sqrt(len(means)):.1f}" if len(means) > 1 else ""
    return f"{means.mean():.1f}{error}"


def table(rule: str) -> str:
    """One row a method, one column a dataset."""
    found = {name: read_runs(HERE / f"{file}.records.parquet") for name, file in DATA.items()}
    lines = [f"| | {' | '.join(DATA)} |", "|---" * (len(DATA) + 1) + "|"]
    for title, algorithm in METHODS.items():
        cells = [cell([run for run in runs if run.spec.algorithm == algorithm], rule) for runs in found.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def settings(run: RunRecord) -> dict[str, object]:
    """What a change may alter, in the order of `RECIPE`, which also has the defaults of optional hyperparameters."""
    own = {**run.spec.hparams, "average": run.spec.options.get("average"), "precision": run.spec.precision}
    return {name: own.get(name, usual) for name, usual in RECIPE.items()}


def changes_table() -> str:
    """The recipe with one change at a time: held-out accuracy after the last step, and the number of solved runs."""
    runs = list(split_averages(read_runs(HERE / "maps" / "one-change.records.parquet")))
    lines = ["| | AND-mask | SAND-mask |", "|---|---|---|"]
    for title, change in CHANGED.items():
        own = [run for run in runs if settings(run) == RECIPE | change]
        cells = [solved([run for run in own if run.spec.algorithm == name]) for name in ("ANDMask", "SANDMask")]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def solved(runs: Sequence[RunRecord]) -> str:
    """`97.0 (14 of 15)`: the mean accuracy on the held-out environment after the last step, and runs above 90%."""
    found = 100.0 * np.array([run.accuracy_in[-1, run.spec.test_envs[0]] for run in runs])
    return f"{found.mean():.1f} ({(found > 90).sum()} of {len(found)})"


def forgetting_table() -> str:
    """Masks that shrink closed weights themselves, beside weight decay."""
    runs = read_runs(HERE / "forgetting.records.parquet")
    lines = ["| | accuracy (runs above 90%) |", "|---|---|"]
    for title, (algorithm, decay) in FORGETTING.items():
        own = [r for r in runs if (r.spec.algorithm, r.spec.hparams["weight_decay"]) == (algorithm, decay)]
        lines.append(f"| {title} | {solved(own)} |")
    return "\n".join(lines)


def images_table(rule: str) -> str:
    """ERM and the masks on images, with averaged weights where they were trained with them."""
    runs = list(split_averages(read_runs(HERE / "images.records.parquet")))
    lines = [f"| | {' | '.join(IMAGES)} |", "|---" * (len(IMAGES) + 1) + "|"]
    for title in ("ERM", "AND-mask", "SAND-mask"):
        for average in (None, "sma", "swad"):
            own = [r for r in runs if (r.spec.algorithm, r.spec.options.get("average")) == (METHODS[title], average)]
            cells = [cell([run for run in own if run.spec.dataset == name], rule, n) for name, n in IMAGES.items()]
            lines.append(f"| {title}{f' + {average.upper()}' if average else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def watermarks(dataset: str, network: str = "mlp") -> list[RunRecord]:
    """The runs on a dataset of `watermarks.py`."""
    runs = read_runs(HERE / "watermarks.records.parquet")
    return [run for run in runs if (run.spec.dataset, run.spec.network) == (dataset, network)]


def watermarks_table(rule: str) -> str:
    """Digits with watermarks, 16 training domains: the mean over trials of each held-out domain, and of all."""
    marked, convnet = watermarks("Watermarks-16"), watermarks("Watermarks-16", "small-convnet")
    rows = {SHORT.get(name, name): [run for run in marked if run.spec.algorithm == name] for name in WATERMARKED}
    rows["ERM, digits without watermarks"] = watermarks("Unmarked-16")
    for name in ("ERM", *SHORT):
        rows[f"{SHORT.get(name, name)}, ConvNet"] = [run for run in convnet if run.spec.algorithm == name]
    rows["ERM, ConvNet, digits without watermarks"] = watermarks("Unmarked-16", "small-convnet")
    lines = ["| | domain 0 | 1 | 2 | 3 | mean |", "|---|---|---|---|---|---|"]
    for title, own in rows.items():
        each = [f"{mean:.1f}" for mean in accuracies(own, rule, 4).mean(axis=0)]
        lines.append(f"| {title} | {' | '.join([*each, cell(own, rule, 4)])} |")
    return "\n".join(lines)


def other_methods_table(rule: str) -> str:
    """All other methods on the same data, one trial, the best on domain 1 first; "-" where the run is missing."""
    runs = [run for run in watermarks("Watermarks-16") if run.spec.algorithm not in WATERMARKED]
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        (env,) = run.spec.test_envs
        chosen = select(RULES[rule], [run], env)
        found.setdefault(run.spec.algorithm, {})[env] = 100 * chosen.test_accuracy  # type: ignore[union-attr]
    lines = ["| | domain 0 | 1 | 2 | 3 |", "|---|---|---|---|---|"]
    for name in sorted(found, key=lambda name: (-found[name].get(1, 0.0), name)):
        cells = [f"{found[name][env]:.1f}" if env in found[name] else "-" for env in range(4)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def domains_table(rule: str) -> str:
    """The masks on digits with watermarks, by the number of training domains: one trial, four held out."""
    sizes = (4, 8, 12, 16, 24)
    lines = [f"| training domains | {' | '.join(map(str, sizes))} |", "|---" * (len(sizes) + 1) + "|"]
    for algorithm, title in SHORT.items():
        cells = []
        for size in sizes:
            runs = [run for run in watermarks(f"Watermarks-{size}") if run.spec.trial_seed == 0]
            cells.append(cell([run for run in runs if run.spec.algorithm == algorithm], rule, 4))
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for name in ("training-domain", "worst-training-domain", "oracle"):
        print(f"{name}\n\n{table(name)}\n\n{images_table(name)}\n")
        print(f"{watermarks_table(name)}\n\n{domains_table(name)}\n\n{other_methods_table(name)}\n")
    print(f"{changes_table()}\n\n{forgetting_table()}")
