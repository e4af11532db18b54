"""K runs as one program. With K = 1, `vmap` is not used."""

import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from sandmask._physical import has_kernels
from sandmask.algorithms import HeldOutProbe, Hparams, Metrics, State
from sandmask.datasets import Dataset, ImageDataset
from sandmask.errors import SandmaskError
from sandmask.functional import EnvBatch, random
from sandmask.functional.across_processes import AcrossProcesses
from sandmask.functional.ranks import ALONE, Ranks
from sandmask.networks import normalization
from sandmask.records import RunSpec, averages_of
from sandmask.training.averaging import AT_ONCE, Average, average_metric, averaged_state, start_averages, step_averages
from sandmask.training.evaluation import Accuracies, Evaluator, Tally
from sandmask.training.minibatches import STEP, Minibatches
from sandmask.training.model_file import build_algorithm
from sandmask.training.processes import check_divides
from sandmask.training.sampling import Sampler
from sandmask.training.schedule import PATIENCE, repeats, scheduled, start_plateau
from sandmask.training.specs import (
    SHAPE_HPARAMS,
    check_environments,
    check_measures,
    check_precision,
    check_train_eval_limit,
    init_seed,
    stack_key,
)
from sandmask.training.stack_step import (
    Step,
    choose_differentiator,
    divided_step,
    looped_step,
    run_by_run,
    stacked_step,
)
from sandmask.training.validation_gradients import ValidationGradients

EVALUATED_ACTIVATIONS = 2**29  # activations of a layer in one batch of an evaluation on a GPU: 2 GiB
CACHED_ACTIVATIONS = 2**21  # activations of a layer that fit into the cache of a CPU
_NOT_FOR_ALGORITHMS = ("averages", "plateau")  # entries of the state that only the stack uses
_log = logging.getLogger(__name__)


def without_averages(state: State) -> tuple[State, dict[str, Average]]:
    """Split a state into the part for algorithms and the averages of weights."""
    return {name: value for name, value in state.items() if name not in _NOT_FOR_ALGORITHMS}, state.get("averages", {})


class Stack:
    """K runs that train as one program.

    The runs differ only in numbers: seeds, trials, held-out environments, and hyperparameters that do not determine
    shapes. Call the methods within `stack_settings`, which sets the precision. See `train_stack` for the arguments;
    `ranks` are processes that compute the stack together.
    """

    def __init__(
        self,
        specs: Sequence[RunSpec],
        dataset: Dataset,
        device: torch.device,
        *,
        weights: str | None = None,
        compiled: bool = False,
        diagnostics: bool = False,
        metrics: Sequence[str] = (),
        train_eval_limit: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        _check(specs, dataset, metrics, train_eval_limit)
        self.specs = tuple(specs)
        self.n_runs = len(specs)
        self.device = device
        self.ranks = ranks
        self.diagnostics = diagnostics
        self.averages = averages_of(specs[0].options)
        self.keys = torch.stack([random.key_of(spec.seed) for spec in specs]).to(device)
        self.hparams = {
            name: torch.tensor([float(spec.hparams[name]) for spec in specs], device=device)
            for name in specs[0].hparams
            if name not in SHAPE_HPARAMS
        }
        self.dataset = _prepared(specs[0], dataset).to(device)
        drops = any(spec.hparams.get(rate, 0.0) > 0 for spec in specs for rate in ("dropout", "mlp_dropout"))
        self.algorithm = build_algorithm(specs[0], dataset, weights=weights, dropout=drops).to(device)
        check_precision(specs[0], self.algorithm)
        check_divides(ranks, specs[0], self.algorithm, compiled=compiled)
        if compiled:
            self._compile()
        self.stacks = self._use_differentiator()
        self._step = self._choose_step()
        self.sampler = Sampler(dataset, specs, int(specs[0].hparams["batch_size"]), device)
        self._together = self._runs_at_a_time()
        rows = ranks.rows(self.algorithm.reads, self.sampler.n_envs, self.sampler.batch_size)
        self.minibatches = Minibatches(self.dataset, self.sampler, self.keys, specs[0].steps, rows)
        chunk = self._examples_at_a_time
        self.evaluator = Evaluator(self.dataset, specs, device, chunk, metrics, ranks, train_eval_limit)
        probe = HeldOutProbe.of(self.algorithm) if diagnostics else None
        self._gradients = None if probe is None else ValidationGradients(probe, self.dataset, specs, stacks=self.stacks)

    def _compile(self) -> None:
        """Compile the network and the augmentation of images."""
        if self.algorithm.network.norms:
            raise SandmaskError("--compile does not support freeze_bn=0. Leave out one of them.")
        self.algorithm.network.compile()
        if isinstance(self.dataset, ImageDataset) and self.dataset.augmentation is not None:
            self.dataset = self.dataset.compiled()

    def _use_differentiator(self) -> bool:
        """Choose how the algorithm takes gradients; return whether the runs take their steps together."""
        network = self.algorithm.network
        kernels = has_kernels(self.keys) and not network.compiled
        stacks = network.stacks or (kernels and network.has_kernels and self.algorithm.stacks_by_kernels)
        if self.n_runs > 1 and not stacks and network.why_not_stacked:
            _say_why(self.specs[0].network, network.why_not_stacked)
        differentiator = choose_differentiator(network, self.n_runs, stacks=stacks, kernels=kernels)
        if self.ranks.size > 1:
            differentiator = AcrossProcesses(self.ranks, differentiator)
        problem = replace(self.algorithm.problem, diagnostics=self.diagnostics)
        self.algorithm.use(problem.with_differentiator(differentiator))
        return stacks

    def _choose_step(self) -> Step:
        """The step of K runs."""
        differentiate = self.algorithm.problem.differentiate
        if isinstance(differentiate, AcrossProcesses):
            return self.lift(divided_step(self.algorithm, differentiate, stacks=self.stacks), (0, 0, 0, 0))
        if not self.stacks:
            return looped_step(self.algorithm)
        return stacked_step(self.algorithm) or self.lift(self.algorithm.step, (0, 0, 0, 0))

    def _runs_at_a_time(self) -> int:
        """The number of runs that take steps together: all runs, or on a CPU as many as fit into the cache."""
        if self.device.type != "cpu":
            return self.n_runs
        width = int(self.specs[0].hparams.get("mlp_width", self.algorithm.network.n_features))
        of_one = self.sampler.n_envs * self.sampler.batch_size * width
        return min(max(CACHED_ACTIVATIONS // (2 * of_one), 1), self.n_runs)

    def _examples_at_a_time(self, n_runs: int) -> int:
        """The number of examples that `n_runs` runs evaluate together, limited by memory or a CPU's cache."""
        shape = self.dataset.input_shape
        width = max(int(self.specs[0].hparams.get("mlp_width", 0)), 1024)
        activations = 64 * math.prod(shape[1:]) if len(shape) == 3 else width
        room = EVALUATED_ACTIVATIONS // n_runs if self.device.type != "cpu" else CACHED_ACTIVATIONS
        return max(room // activations, 16)

    def init(self) -> State:
        """The stacked states of the runs before the first step: every tensor has a leading dimension K."""
        states = [self.algorithm.init(init_seed(spec)) for spec in self.specs]
        for state, spec in zip(states, self.specs, strict=True):
            if (scale := float(spec.hparams.get("init_scale", 1.0))) != 1.0:
                state["params"] = state["params"] * scale
        stacked: State = pytree.tree_map(lambda *leaves: torch.stack(leaves).to(self.device), *states)
        if self.averages:
            stacked["averages"] = start_averages(self.averages, stacked, self.algorithm.averaged)
        if PATIENCE in self.hparams and not repeats(self.hparams):
            stacked["plateau"] = start_plateau(self.n_runs, self.device)
        return stacked

    def lift(self, function: Callable[..., Any], in_dims: tuple[int | None, ...]) -> Callable[..., Any]:
        """Turn a function of one run into a function of K runs. Arguments with dimension None are shared."""
        stacked = self.n_runs > 1 and self.stacks
        return vmap(function, in_dims=in_dims) if stacked else run_by_run(function, in_dims)

    def feed(self, start: int) -> Generator[EnvBatch, None, None]:
        """Yield the minibatches [K, E, B, ...] of steps `start`, `start` + 1, ... Images are decoded ahead."""
        for step, read in enumerate(self.minibatches.read(start), start):
            yield from self.batches(torch.tensor(step, device=self.device), 1, [read])

    def batches(self, start: Tensor, count: int, read: Sequence[Any] = ()) -> Iterator[EnvBatch]:
        """Yield the minibatches of `count` steps: see `Minibatches.of_steps`."""
        return self.minibatches.of_steps(start, count, read)

    @property
    def takes_turns(self) -> bool:
        """Whether runs take turns, because not all of them take steps together."""
        return self._together < self.n_runs

    def step(self, state: State, batch: EnvBatch) -> tuple[State, Metrics]:
        """Take a step. Return the states and the metrics [K]."""
        state, (metrics,) = self.steps(state, [batch])
        return state, metrics

    def steps(self, state: State, batches: Iterable[EnvBatch]) -> tuple[State, list[Metrics]]:
        """Take a step on each batch. Return the states and the metrics [K] of each step.

        If runs take turns, each run takes all of these steps in its turn, so that its data stays in the cache.
        """
        if not self.takes_turns:
            return self._steps_of(self.keys, self.hparams, state, batches)
        everything = (self.keys, self.hparams, state, list(batches))
        turns = [slice(begin, begin + self._together) for begin in range(0, self.n_runs, self._together)]
        # Copy into aligned memory, as in the later steps of a turn: the rounding of CPU kernels depends on the
        # alignment, and results must not depend on the number of steps in a turn.
        parts = [self._steps_of(*pytree.tree_map(lambda t: t[runs].clone(), everything)) for runs in turns]  # noqa: B023
        together: tuple[State, list[Metrics]] = pytree.tree_map(lambda *leaves: torch.cat(leaves), *parts)
        return together

    def _steps_of(
        self, keys: Tensor, hparams: Hparams, state: State, batches: Iterable[EnvBatch]
    ) -> tuple[State, list[Metrics]]:
        found: list[Metrics] = []
        iterates: list[State] = []  # not yet in the averages
        plateau = state.get("plateau")
        state, averages = without_averages(state)
        for batch in batches:
            step_keys = random.fold(random.fold(keys, state["step"]), STEP)
            now = scheduled(hparams, state["step"], self.specs[0].steps, plateau)
            with self.algorithm.network.training():
                stepped, metrics = self._step(state, batch, now, step_keys)
            state = self._track(state, stepped, batch)
            found.append(metrics)
            if averages:
                rate = {"rate": now["lr"]} if plateau is not None or repeats(hparams) else {}
                iterates.append({**{entry: state[entry] for entry in ("step", *self.algorithm.averaged)}, **rate})
            if len(iterates) == AT_ONCE:
                averages, iterates = step_averages(averages, iterates, hparams), []
        averages = step_averages(averages, iterates, hparams)
        more = {"averages": averages or None, "plateau": plateau}
        return {**state, **{name: value for name, value in more.items() if value is not None}}, found

    def _track(self, before: State, after: State, batch: EnvBatch) -> State:
        """The states after a step, with updated running statistics if batch-norm is not frozen."""
        network = self.algorithm.network
        if not network.norms:
            return after
        inputs = batch.x.flatten(1, 2)
        tracked = [network.tracked(*each) for each in zip(before["params"], after["params"], inputs, strict=True)]
        return {**after, "params": torch.stack(tracked)}

    @torch.no_grad()
    def evaluate(self, state: State) -> tuple[Tensor, Metrics]:
        """Return the numbers of correct predictions [K, G], and metrics, with validation loss and averages."""
        state, averages = without_averages(state)
        tally = self.tally(state)
        metrics = {"validation_loss": self.evaluator.validation_loss(tally), **tally.measured}
        for name in averages:
            if name != "swad":  # which is evaluated only at the end of the training
                metrics |= self.evaluate_average(state, averages, name)
        return tally.right, metrics

    @torch.no_grad()
    def evaluate_average(self, state: State, averages: dict[str, Average], name: str) -> Metrics:
        """Accuracies and metrics of an average: see `Evaluator.summary`."""
        tally, metric = self.tally(averaged_state(state, averages[name])), average_metric(name)
        measured = {f"{metric}/{measure}": values for measure, values in tally.measured.items()}
        return {metric: self.evaluator.summary(tally), **measured}

    @torch.no_grad()
    def tally(self, state: State) -> Tally:
        """The numbers of correct predictions and the losses of every run in every group of the evaluator."""
        if self.algorithm.uses_context:
            return self.evaluator.in_context(self.lift(self.algorithm.predict, (0, 0)), state)
        if self.device.type == "cpu":  # where single matrix products are faster than batched products
            return self.evaluator.alone(run_by_run(self.algorithm.predict, (0, None)), state)
        return self.evaluator.alone(self.lift(self.algorithm.predict, (0, None)), state)

    def accuracies(self, state: State) -> Accuracies:
        """The accuracy of every run on every environment."""
        return self.evaluator.fractions(self.tally(state).right)

    def held_out(self, state: State) -> Metrics:
        """Metrics [K] of the gradients on validation examples, named `held_out_...`; none without diagnostics."""
        return {} if self._gradients is None else self._gradients(state, self.hparams)


def _check(specs: Sequence[RunSpec], dataset: Dataset, metrics: Sequence[str], train_eval_limit: int | None) -> None:
    """Raise an error for runs that cannot train as one program on this dataset."""
    if len({stack_key(spec) for spec in specs}) != 1:
        raise SandmaskError("These runs cannot train as one program, because their `stack_key` differs.")
    check_environments(specs[0], dataset)
    check_measures(metrics, specs[0], dataset)
    check_train_eval_limit(train_eval_limit)


def _prepared(spec: RunSpec, dataset: Dataset) -> Dataset:
    """The dataset of a run: images are normalized for the network's weights, and augmented unless switched off."""
    if not isinstance(dataset, ImageDataset):
        return dataset
    if not spec.hparams.get("data_augmentation", 1):
        dataset = dataset.unaugmented()
    return dataset.normalized_by(*normalization(spec.network))


@cache
def _say_why(network: str, reason: str) -> None:
    """Log why a user's own network is not stacked, once per process."""
    _log.warning("Runs of the network %s train one after the other: %s.", network, reason)
