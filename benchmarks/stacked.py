"""Speed of runs that train as one program, and of one run at a time, in run-steps per second.

python -m benchmarks.stacked [spirals] [algorithms] [convnet] [convnet-evaluated] [convnet-algorithms]     # or all
python -m benchmarks.stacked algorithms Fish,DANN     # some algorithms only
python -m benchmarks.stacked algorithms quick         # stacks only, short readings: all algorithms in a few minutes
python -m benchmarks.stacked convnet fp32x3,bf16      # some precisions only

The ConvNet gets random images of ColoredMNIST's shape; their content does not affect the speed.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import torch

from benchmarks._measure import print_rows, seconds_of
from benchmarks.step_error import step_errors
from sandmask.algorithms import ALGORITHMS
from sandmask.datasets import DATASETS, Dataset, TensorDataset, load_dataset
from sandmask.training import Stack, make_spec, set_precision
from sandmask.training.cuda_graph import Carry, Program
from sandmask.training.malloc import freed_memory_kept

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SECONDS = 1.0  # of every measurement
# On a CPU, which other programs may use too, stacks of all sizes take turns, and the median is reported.
WIDTHS = {256: ([1, 2, 4, 16], 15), 1024: ([1, 2, 8], 7)}  # sizes of stacks and number of turns, by width
COMBINED = ("SANDMask+VREx", "ANDMask+CORAL", "PCGrad+Mixup", "SAM+CORAL", "SAM+SANDMask")  # beside the registered ones
SECTIONS = {"spirals", "algorithms", "convnet", "convnet-evaluated", "convnet-algorithms"}
PRECISIONS = ("fp32", "fp32x3", "tf32", "bf16", "fp16")
# Run-steps per second of DomainBed's own code on the same GPU.
DOMAINBED = {"Spirals": "its script 12, its bare update 40", "ColoredMNIST": "65 (its ERM 266)"}


class Runs:
    """K runs of one algorithm, with different seeds and held-out environments."""

    def __init__(
        self,
        dataset: Dataset,
        algorithm: str,
        n_runs: int,
        hparams: Mapping[str, float],
        precision: str = "fp32",
        fast: bool = True,
        evaluate: bool = True,
        limit: int | None = None,
    ) -> None:
        entry = DATASETS[dataset.name]
        own = {"tau": 0.5} if "Mask" in algorithm else {}
        held_out = itertools.cycle(entry.report_envs or range(len(entry.environments)))
        specs = [
            make_spec(entry, algorithm, [env], hparams={**hparams, **own}, seed=seed, precision=precision)
            for seed, env in zip(range(n_runs), held_out, strict=False)
        ]
        set_precision(precision)
        self.stack = Stack(specs, dataset, DEVICE, train_eval_limit=limit)
        self.evaluate = evaluate
        nowhere = torch.full((n_runs,), -1, device=DEVICE)
        self.program = Program(self.stack, Carry(self.stack.init(), {}, nowhere), fast=fast)
        # Without evaluations, a few steps are enough. 100 steps of 44 runs that take turns would need 15 seconds.
        self.every = entry.checkpoint_every if evaluate else self.program.chunk
        self.program.advance(1)
        self.round()

    def round(self) -> None:
        """Train from one evaluation to the next, or without evaluations for the steps of one graph."""
        until = self.program.done + self.every
        while self.program.done < until:
            self.program.advance(until - self.program.done)
        if self.evaluate:
            self.program.evaluate()

    def _rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    def rate(self) -> float:
        """Measure run-steps per second."""
        seconds_of(self.round)
        once = seconds_of(self.round)
        rounds = max(1, round(SECONDS / once))
        taken = seconds_of(lambda: self._rounds(rounds))
        return rounds * self.every * self.stack.n_runs / taken


def measure(dataset: Dataset, algorithm: str, n_runs: int, hparams: Mapping[str, float], **how: object) -> float:
    """Measure the rate; 0 if the runs do not fit into memory."""
    try:
        return Runs(dataset, algorithm, n_runs, hparams, **how).rate()  # type: ignore[arg-type]
    except torch.OutOfMemoryError:
        return 0.0
    finally:
        if ON_GPU:
            torch.cuda.empty_cache()


def _settings(hparams: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in hparams.items())


def _evaluation(dataset: Dataset, wanted: bool) -> str:
    return f"evaluation every {DATASETS[dataset.name].checkpoint_every} steps" if wanted else "no evaluation"


def stack_sizes(
    dataset: Dataset,
    hparams: Mapping[str, float],
    sizes: list[int],
    precisions: Sequence[str],
    *,
    evaluate: bool = True,
    limit: int | None = None,
) -> None:
    """Print how the rate of SAND-mask grows with the stack, in each precision. `limit` is the --train-eval-limit."""
    algorithm = "SANDMask"
    heads = ("precision", "one run, eager", *(f"stack of {n}" for n in sizes), "gain", "error of a step")
    rows: list[tuple[str, ...]] = [heads]
    errors = step_errors(dataset, hparams, precisions)
    for precision in precisions:
        how = {"precision": precision, "evaluate": evaluate, "limit": limit}
        alone = measure(dataset, algorithm, 1, hparams, fast=False, **how)
        rates = [measure(dataset, algorithm, n, hparams, **how) for n in sizes]
        ratio = f"{max(rates) / alone:.0f}" if max(rates) > 10 * alone else f"{max(rates) / alone:.2f}"
        error = f"{errors[precision]:.1e}"
        rows.append((precision, f"{alone:,.0f}", *(f"{rate:,.0f}" for rate in rates), ratio, error))
        print(*rows[-1], flush=True, file=sys.stderr)
    title = f"{dataset.name}, {algorithm}, {_settings(hparams)}: run-steps a second, {_evaluation(dataset, evaluate)}"
    title += "" if limit is None else f", --train-eval-limit {limit}"
    print_rows(f"{title} (DomainBed: {DOMAINBED.get(dataset.name, 'not measured')})", rows)


def in_turns(dataset: Dataset, algorithm: str, hparams: Mapping[str, float], sizes: list[int], turns: int) -> None:
    """Print the same on a CPU, where stacks of all sizes take turns from one evaluation to the next."""
    stacks = {n: Runs(dataset, algorithm, n, hparams) for n in sizes}
    seconds: dict[int, list[float]] = {n: [] for n in sizes}
    for _ in range(turns):
        for n, runs in stacks.items():
            seconds[n].append(seconds_of(runs.round) / (n * runs.every))
    rates = {n: 1.0 / statistics.median(taken) for n, taken in seconds.items()}
    gains = {
        n: statistics.median(a / b for a, b in zip(seconds[1], taken, strict=True)) for n, taken in seconds.items()
    }
    rows: list[tuple[str, ...]] = [("stack of", "run-steps a second", "over one run")]
    rows += [(str(n), f"{rates[n]:,.0f}", f"{gains[n]:.2f}") for n in sizes]
    print_rows(f"{dataset.name}, {algorithm}, {_settings(hparams)}: {_evaluation(dataset, True)}", rows)


def every_algorithm(
    dataset: Dataset, n_runs: int, hparams: Mapping[str, float], precision: str, names: Sequence[str], *, quick: bool
) -> None:
    """Print the rates of algorithms, alone and stacked; with `quick` stacked only."""
    evaluate = dataset.name == "Spirals"
    how = {"precision": precision, "evaluate": evaluate}
    columns = [] if quick else [("one run, eager", 1, False), ("one run", 1, True)]
    columns.append((f"stack of {n_runs}", n_runs, True))
    rows: list[tuple[str, ...]] = [("algorithm", *(title for title, _, _ in columns), "gain")]
    for name in names:
        try:
            rates = [measure(dataset, name, count, hparams, fast=fast, **how) for _, count, fast in columns]
        except Exception as error:  # noqa: BLE001 - continue with the others
            print(name, type(error).__name__, str(error)[:300], flush=True, file=sys.stderr)
            continue
        gain = "" if quick else f"{rates[-1] / rates[0]:.1f}"
        rows.append((name, *(f"{rate:,.0f}" for rate in rates), gain))
        print(*rows[-1], flush=True, file=sys.stderr)
    title = f"{dataset.name}, {_settings(hparams)}, {precision}: run-steps a second"
    print_rows(f"{title}, {_evaluation(dataset, evaluate)}", rows)


def digits() -> Dataset:
    """Make random images with ColoredMNIST's shape."""
    generator = torch.Generator().manual_seed(0)
    n = 23_333
    parts = [
        (
            torch.randint(0, 256, (n, 2, 28, 28), dtype=torch.uint8, generator=generator),
            torch.randint(2, (n,), generator=generator),
        )
        for _ in range(3)
    ]
    return TensorDataset("ColoredMNIST", DATASETS["ColoredMNIST"].environments, ("0", "1"), parts)


def main() -> None:
    global SECONDS  # noqa: PLW0603 - of this program's measurements
    start = time.monotonic()
    words = set(sys.argv[1:])
    wanted = words & SECTIONS or SECTIONS
    quick = "quick" in words
    SECONDS = 0.3 if quick else SECONDS
    chosen = {name for word in words - SECTIONS - {"quick"} for name in word.split(",")}
    precisions = [name for name in PRECISIONS if name in chosen] or list(PRECISIONS)
    names = sorted(chosen.difference(PRECISIONS)) or [*ALGORITHMS, *COMBINED]
    spirals = load_dataset("Spirals")
    if ON_GPU and "spirals" in wanted:
        stack_sizes(spirals, {"batch_size": 128, "mlp_width": 256}, [1, 16, 64, 256], precisions)
    if ON_GPU and "algorithms" in wanted:
        every_algorithm(spirals, 64, {"batch_size": 128, "mlp_width": 256}, "fp32x3", names, quick=quick)
    if ON_GPU and "convnet" in wanted:
        stack_sizes(digits(), {"batch_size": 64}, [1, 16, 44], precisions, evaluate=False)
    if ON_GPU and "convnet-evaluated" in wanted:
        for limit in (None, 1000):
            stack_sizes(digits(), {"batch_size": 64}, [16, 44], precisions, limit=limit)
    if ON_GPU and "convnet-algorithms" in wanted:
        every_algorithm(digits(), 16, {"batch_size": 64}, "bf16", names, quick=quick)
    if not ON_GPU:
        for algorithm in ("SANDMask", "ERM"):
            for width, (sizes, turns) in WIDTHS.items():
                in_turns(spirals, algorithm, {"batch_size": 32, "mlp_width": width}, sizes, turns)
    print(f"\n{time.monotonic() - start:.0f} seconds in all.")


if __name__ == "__main__":
    with freed_memory_kept():
        main()
