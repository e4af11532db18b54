"""Compare the results of the fast path and the slow path: accuracy curves of the same specs over 20 seeds.

The slow path is a single run on the CPU in float32 and plain torch, without stacks, kernels and graphs. The fast path
is a stack of all seeds on the GPU, in each precision. Rounding makes single runs drift apart, so distributions are
compared. The paired permutation test uses 10,000 sign flips of the seeds' differences. Its statistic is the largest
standardized difference of mean accuracy at any checkpoint, on the training environments and on the held-out one.

python -m benchmarks.fast_path [FILE]     # FILE stores the records of the slow runs, which need no GPU, to reuse them
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks._measure import print_rows
from sandmask.datasets import DATASETS, load_dataset
from sandmask.records import RunRecord, RunSpec, read_runs, write_archive
from sandmask.training import make_spec, train_stack

SEEDS, STEPS, EVERY, FLIPS = 20, 500, 25, 10_000
SHARED = {"batch_size": 64, "mlp_width": 72, "lr": 0.01, "weight_decay": 1e-5, "dropout": 0.1}
METHODS: dict[str, dict[str, float]] = {
    "ERM": {},
    "IRM": {"irm_lambda": 10.0, "irm_penalty_anneal_iters": 100},
    "ANDMask": {"tau": 0.8},
    "SANDMask": {"tau": 0.5},
    "SANDMask-released": {"tau": 0.5, "k": 10.0},
}
Curves = NDArray[np.float64]  # [seeds, checkpoints]


def specs(method: str) -> list[RunSpec]:
    """Return a spec for each seed."""
    options = {"steps": STEPS, "checkpoint_every": EVERY, "hparams": {**SHARED, **METHODS[method]}}
    entry = DATASETS["Spirals"]
    return [make_spec(entry, method, [0], seed=s, trial_seed=s, **options) for s in range(SEEDS)]  # type: ignore[arg-type]


def train(chosen: list[RunSpec], device: str) -> list[RunRecord]:
    """Train the runs as one stack."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dataset, file = load_dataset("Spirals"), Path(folder) / "checkpoint.safetensors"
        return train_stack(chosen, dataset, torch.device(device), file, train_eval_limit=1)  # not compared


def curves(runs: list[RunRecord]) -> dict[str, Curves]:
    """Return accuracies over training, on training environments and on the held-out one."""
    return {
        "training environments": np.stack([run.accuracy_out[:, 1:].mean(1) for run in runs]),
        "held out": np.stack([run.accuracy_in[:, 0] for run in runs]),
    }


def p_value(one: Curves, other: Curves) -> tuple[float, float]:
    """Return the largest difference of means, and the p-value of the permutation test."""
    differences = one - other
    flips = np.random.default_rng(0).choice([-1.0, 1.0], (FLIPS, len(differences)))
    flips[0] = 1.0
    means = flips @ differences / len(differences)
    error = np.sqrt(np.maximum((differences**2).mean(0) - means**2, 1e-12) / len(differences))
    statistic = np.abs(means / error).max(1)
    return float(np.abs(means[0]).max()), float((statistic >= statistic[0] - 1e-9).mean())


def trained_apart(stacks: Sequence[list[RunSpec]]) -> Iterator[list[RunRecord]]:
    """Train each stack on one core, and yield its runs."""
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        yield from pool.map(train, stacks, ["cpu"] * len(stacks))


def slow_runs(kept: Path | None) -> list[RunRecord]:
    """Train every seed of every method alone, or read the runs from the file if it exists."""
    if kept is not None and kept.exists():
        return read_runs(kept)
    found = [run for (run,) in trained_apart([[spec] for method in METHODS for spec in specs(method)])]
    if kept is not None:
        write_archive(found, kept)
    return found


def main() -> None:
    kept = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if not torch.cuda.is_available() and kept is None:
        print("fast_path: needs a CUDA device; skipped.")
        return
    found = slow_runs(kept)
    if not torch.cuda.is_available():
        return
    slow = {method: found[i * SEEDS : (i + 1) * SEEDS] for i, method in enumerate(METHODS)}
    head = ("method", "precision", "where", "accuracy, slow", "accuracy, fast", "largest difference", "p")
    rows: list[tuple[str, ...]] = [head]
    for method in METHODS:
        for precision in ("fp32", "tf32", "bf16", *(["fp16"] if "Mask" in method else [])):
            fast = train([replace(spec, precision=precision) for spec in specs(method)], "cuda")
            pairs = zip(curves(slow[method]).items(), curves(fast).values(), strict=True)
            for (where, one), other in pairs:
                largest, p = p_value(one, other)
                accuracies = (f"{100 * each[:, -1].mean():.2f}" for each in (one, other))
                rows.append((method, precision, where, *accuracies, f"{100 * largest:.2f}", f"{p:.3f}"))
    print_rows(f"Spirals, {SEEDS} seeds, {STEPS} steps: runs alone on the CPU against a stack on the GPU (in %)", rows)


if __name__ == "__main__":
    main()
