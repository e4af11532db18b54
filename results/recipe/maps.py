"""Phase diagrams of Spirals: accuracy on held-out environments over two settings at a time, stacked on one GPU.

python results/recipe/maps.py FOLDER [MAP ...]     trains the runs that FOLDER lacks; one archive of records per map
"""

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from sandmask.datasets import dataset_entry, load_dataset
from sandmask.plugins import load_plugins
from sandmask.records import RunSpec, read_runs, write_archive
from sandmask.sweeps import group
from sandmask.training import choose_device, make_spec, train_stack

MASKS = ("ANDMask-rescaled", "SANDMask-rescaled")
HELD_OUT = (3, 5, 14)
STACK = 96  # runs in one program
RATES = [10**x for x in (-3.5, -3, -2.75, -2.5, -2.25, -2, -1.5)]
DECAYS = [0.0, *(10.0**x for x in (-6, -5, -4.5, -4, -3.5, -3, -2))]


def spec(
    algorithm: str,
    env: int,
    steps: int = 1001,
    dataset: str = "Spirals",
    seed: int = 0,
    precision: str = "tf32",
    averages: tuple[str, ...] = (),
    **hparams: float,
) -> RunSpec:
    """One run of the recipe on published data, or on the data given."""
    known = {name: value for name, value in hparams.items() if name != "tau" or "Mask" in algorithm}
    return make_spec(
        dataset_entry(dataset), algorithm, [env], steps=steps, checkpoint_every=50,
        hparams=known, seed=seed, space="recipe", precision=precision, averages=averages,
    )  # fmt: skip


def decay_and_rate(steps: int, algorithms: tuple[str, ...]) -> Iterator[RunSpec]:
    """Weight decay against learning rate, at tau = 0.9."""
    for algorithm, lr, decay, env in itertools.product(algorithms, RATES, DECAYS, HELD_OUT):
        yield spec(algorithm, env, steps, lr=lr, weight_decay=decay, tau=0.9)


def batch_and_threshold() -> Iterator[RunSpec]:
    """Batch size of each environment against tau."""
    taus = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
    for size, tau, algorithm, env in itertools.product((32, 64, 128, 256, 512), taus, MASKS, HELD_OUT):
        yield spec(algorithm, env, lr=10**-2.25, weight_decay=1e-4, tau=tau, batch_size=size)


def environments_and_signature() -> Iterator[RunSpec]:
    """Number of training environments against the dimension of the signatures."""
    for n, d, algorithm in itertools.product((2, 4, 8, 16, 32), (2, 8, 32, 128), ("ERM", *MASKS)):
        data = f"Spirals:seed=7:environments={n}:signature={d}"
        for env, seed in itertools.product((1, 2), range(3)):
            yield spec(
                algorithm, env, dataset=data, seed=seed, lr=10**-2.25, weight_decay=1e-4, tau=0.9, batch_size=256
            )


def thresholds() -> Iterator[RunSpec]:
    """Which default tau and decay, on all published environments with a signature; once with twice the steps."""
    envs = range(1, 17)
    for algorithm, tau, decay, env in itertools.product(MASKS, (0.9, 0.95), (10**-4.5, 10**-3.5), envs):
        yield spec(algorithm, env, lr=10**-2.25, weight_decay=decay, tau=tau)
    for algorithm, lr, env in itertools.product(MASKS, (10**-2.5, 10**-2.25), envs):
        yield spec(algorithm, env, 2001, lr=lr, weight_decay=1e-4, tau=0.95)


def kinds_of_decay() -> Iterator[RunSpec]:
    """No decay, decay so small that it is below Adam's epsilon, decoupled decay, forgetting on purpose."""
    for env, seed in itertools.product(HELD_OUT, range(2)):
        one = {"env": env, "seed": seed, "lr": 10**-2.25}
        for algorithm, decay in itertools.product(MASKS, (0.0, 1e-10, 1e-9, 1e-8, 1e-7)):
            yield spec(algorithm, tau=0.95, weight_decay=decay, **one)
        for algorithm, decay in itertools.product(MASKS, (1e-3, 1e-2, 1e-1, 1.0)):
            yield spec(algorithm, tau=0.95, weight_decay=0.0, decoupled_decay=decay, **one)
        for wait, rate in itertools.product((0, 10, 30, 100, 300), (0.1, 1.0)):
            yield spec(
                "ForgettingANDMask", tau=0.95, weight_decay=0.0, forget_after=float(wait), forget_rate=rate, **one
            )


CHANGES: dict[str, dict[str, float]] = {
    "the recipe": {},
    "not rescaled": {"rescale": 0},
    "no weight decay": {"weight_decay": 0.0},
    "decoupled weight decay of 0.1": {"weight_decay": 0.0, "decoupled_decay": 0.1},
    "batch of 128": {"batch_size": 128},
    "dropout of 0.1": {"dropout": 0.1},
    "dropout of 0.5": {"dropout": 0.5},
    "tau of 0.7": {"tau": 0.7},
    "tau of 1": {"tau": 1.0},
    "constant learning rate": {"lr_final": 1.0},
    "Adam's first beta of 0.5": {"adam_beta1": 0.5},
}


def one_change() -> Iterator[RunSpec]:
    """The recipe with one change at a time, on fresh data; also with averaged weights and in other precisions."""
    for env, seed, algorithm in itertools.product((1, 3, 5, 9, 14), range(3), ("ANDMask", "SANDMask")):
        one = {"algorithm": algorithm, "env": env, "seed": seed, "dataset": "Spirals:seed=11"}
        for change in CHANGES.values():
            yield spec(**one, **change)
        yield spec(**one, averages=("sma",))
        for precision in ("fp32", "bf16", "fp16"):
            yield spec(**one, precision=precision)


MAPS = {
    "one-change": one_change,
    "thresholds": thresholds,
    "kinds-of-decay": kinds_of_decay,
    "decay-rate-501": lambda: decay_and_rate(501, MASKS),
    "decay-rate-1001": lambda: decay_and_rate(1001, (*MASKS, "ANDMask", "SANDMask", "ERM")),
    "batch-tau": batch_and_threshold,
    "environments-signature": environments_and_signature,
}


def main() -> None:
    """Train the maps asked for; each stack is saved as it ends, so that the same command resumes."""
    load_plugins([Path(__file__).with_name("forgetting.py")])
    folder, wanted = Path(sys.argv[1]), sys.argv[2:] or list(MAPS)
    for name in wanted:
        path, start = folder / f"{name}.records.parquet", time.monotonic()
        records = read_runs(path) if path.exists() else []
        done = {run.spec.id for run in records}
        with tempfile.TemporaryDirectory() as scratch:
            for number, stack in enumerate(group((s for s in MAPS[name]() if s.id not in done), lambda _: STACK)):
                checkpoint = Path(scratch) / f"{number}.safetensors"
                data = load_dataset(stack.specs[0].dataset)
                records += train_stack(stack.specs, data, choose_device(None), checkpoint)
                write_archive(records, path)
                print(f"{name}: {len(records)} runs, {time.monotonic() - start:.0f} s", flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
