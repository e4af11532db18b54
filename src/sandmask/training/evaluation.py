"""Accuracy and loss of K runs on the "in" and "out" splits of every environment."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from sandmask._devices import widest_float
from sandmask.algorithms import State, cross_entropy
from sandmask.datasets import Dataset
from sandmask.functional.ranks import Ranks
from sandmask.records import RunSpec, Sizes
from sandmask.training.measures import Counter
from sandmask.training.sampling import holdout_fraction, split_environment

CONTEXT = 64  # examples in a batch for methods that use the whole batch, as in DomainBed
BITS = 32  # number of rows that `different_columns` packs into one integer

Predict = Callable[[State, Tensor], Tensor]  # states of K runs, inputs [N, ...] or [K, N, ...] -> logits [K, N, C]
Runs = Tensor | slice  # indices of runs, or all runs
Kind = tuple[int, tuple[int, ...]]  # the trial and the held-out environments of a run
OnBatch = Callable[[int, int], None]  # called with the numbers of evaluated examples and of all examples


@dataclass(frozen=True)
class Accuracies:
    """Accuracies in 0..1, with a row for each run and a column for each environment."""

    inside: NDArray[np.float64]  # on the "in" splits, [K, environments]
    outside: NDArray[np.float64]  # on the "out" splits, [K, environments]


class Tally(NamedTuple):
    """The results of an evaluation of K runs on G groups of examples."""

    right: Tensor  # number of correct predictions, [K, G], in float32, which represents these counts exactly
    loss: Tensor  # sum of cross-entropies, [K, G], in float64 if the device supports it
    measured: dict[str, Tensor]  # requested metrics beyond accuracy by name, [K, numbers]


class _Part(NamedTuple):
    """Some of the runs, and chunks of the examples on which exactly these runs are evaluated."""

    runs: Runs
    chunks: Sequence[Tensor]


class Evaluator:
    """Evaluates K runs on groups of examples: group 2e is the "in" split of environment e, 2e + 1 its "out" split.

    It never waits for the device, so that it can be part of a CUDA graph. `on_batch` is called after each batch.

    :param dataset: the dataset.
    :param specs: specs of the runs.
    :param device: where the runs are.
    :param chunk: function of the number of runs; it returns the number of examples that they evaluate together.
    :param metrics: names of metrics beyond accuracy.
    :param ranks: processes that divide the examples.
    :param train_examples: evaluate a run on at most this many "in" examples of each of its training environments. Runs
        of a stack train on different environments, and are then evaluated on different examples.
    """

    on_batch: OnBatch = staticmethod(lambda _, __: None)

    def __init__(
        self,
        dataset: Dataset,
        specs: Sequence[RunSpec],
        device: torch.device,
        chunk: Callable[[int], int],
        metrics: Sequence[str],
        ranks: Ranks,
        train_examples: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.ranks = ranks
        self.metrics = tuple(metrics)
        self.train_examples = train_examples
        self._wide = widest_float(device)
        trials = sorted({spec.trial_seed for spec in specs})
        fraction = holdout_fraction(specs[0])  # all runs of a stack have the same fraction
        envs = range(len(dataset.environments))
        groups = [
            [members for env in envs for members in split_environment(dataset, env, trial, fraction)]
            for trial in trials
        ]
        trial_of_run = [trials.index(spec.trial_seed) for spec in specs]
        self._trial_of_run = torch.tensor(trial_of_run, device=device)
        self._members = [[members.to(device) for members in trial] for trial in groups]
        evaluated = {
            _kind(spec): self._evaluated(groups[trial], spec) for trial, spec in zip(trial_of_run, specs, strict=True)
        }
        self._sizes = np.array([[len(members) for members in evaluated[_kind(spec)]] for spec in specs])
        self._sizes_on_device = torch.from_numpy(self._sizes).to(device)
        self._validation_weights = torch.from_numpy(self._weights_of_losses(specs)).to(device, self._wide)
        # [N, trials, G], 1 where an example is in a group: sums over groups are one product of matrices.
        belongs = torch.zeros(len(dataset.labels), len(trials), self.shape[1])
        for trial, of_trial in enumerate(groups):
            for group, members in enumerate(of_trial):
                belongs[members, trial, group] = 1.0
        self._belongs = belongs.to(device)
        self._runs_by_size = [
            [(size, self._numbers_of(torch.from_numpy(sizes == size))) for size in np.unique(sizes).tolist()]
            for sizes in self._sizes.T
        ]
        self._parts = list(self._divide(evaluated, [_kind(spec) for spec in specs], chunk))

    def _evaluated(self, groups: Sequence[Tensor], spec: RunSpec) -> list[Tensor]:
        """The examples of each group on which a run is evaluated."""
        sizes = [len(members) for members in groups]
        if self.train_examples is not None:
            for inside in (2 * env for env in range(len(groups) // 2) if env not in spec.test_envs):
                sizes[inside] = min(sizes[inside], self.train_examples)
        return [_evenly_spaced(members, size) for members, size in zip(groups, sizes, strict=True)]

    def _divide(
        self, evaluated: Mapping[Kind, Sequence[Tensor]], kinds: Sequence[Kind], chunk: Callable[[int], int]
    ) -> Iterator[_Part]:
        """Divide the examples by the runs that are evaluated on them.

        :param evaluated: for each kind of runs, the examples of each group.
        :param kinds: the kind of each run.
        """
        needed = torch.zeros(len(evaluated), len(self.dataset.labels), dtype=torch.uint8)
        for row, groups in zip(needed, evaluated.values(), strict=True):
            row[torch.cat(list(groups))] = 1
        kind_of_run = torch.tensor([list(evaluated).index(kind) for kind in kinds])
        patterns, pattern_of = different_columns(needed)
        for number, pattern in enumerate(patterns.T):
            needs = pattern[kind_of_run] > 0
            if needs.any():
                examples = torch.nonzero(pattern_of == number)[:, 0].to(self._belongs.device)
                yield _Part(self._numbers_of(needs), _chunks(examples, chunk(int(needs.sum())), self.ranks))

    def _numbers_of(self, chosen: Tensor) -> Runs:
        """The indices of the runs for which `chosen` [K] is true."""
        return slice(None) if chosen.all() else torch.nonzero(chosen)[:, 0].to(self._belongs.device)

    @property
    def shape(self) -> tuple[int, int]:
        """[K, G]."""
        return self._sizes.shape

    def sizes(self, run: int) -> Sizes:
        """The sizes of the "in" and "out" splits on which a run is evaluated."""
        return tuple(self._sizes[run, 0::2].tolist()), tuple(self._sizes[run, 1::2].tolist())

    def alone(self, predict: Predict, state: State) -> Tally:
        """Evaluate methods whose prediction for an example depends on this example alone.

        Examples of all groups and trials share batches. In each trial, an example is in one group.
        """
        n_runs, n_groups = self.shape
        shape = (n_runs, self._belongs.shape[1], n_groups)
        counts = torch.zeros(shape, device=self._belongs.device)
        losses = torch.zeros(shape, dtype=self._wide, device=self._belongs.device)
        counter = self._counter()
        done, total = 0, sum(len(indices) for part in self._parts for indices in part.chunks)
        for runs, chunks in self._parts:
            states, trials = _states_of(state, runs), self._trial_of_run[runs]
            for indices, x in zip(chunks, self.dataset.batches(chunks), strict=True):
                logits, labels = predict(states, _channels_last_on_cpu(x)), self.dataset.labels[indices]
                right, loss = _score(logits, labels)
                if self.metrics:
                    groups = self._belongs[indices].argmax(-1).T[trials]  # [K, n]
                    counter.add(logits, labels, groups, runs)
                belongs = self._belongs[indices].flatten(1)
                # Integers below 2^24 add up exactly in float32, in any order. Losses would lose digits in TF32.
                counts[runs] += (right @ belongs).view(-1, *shape[1:])
                losses[runs] += (loss.to(self._wide) @ belongs.to(self._wide)).view(-1, *shape[1:])
                done += len(indices)
                self.on_batch(done * self.ranks.size, total * self.ranks.size)
        of_trial = torch.arange(n_runs, device=counts.device), self._trial_of_run
        return Tally(self.ranks.sum(counts)[of_trial], self.ranks.sum(losses)[of_trial], counter.values())

    def _counter(self) -> Counter:
        return Counter(self.metrics, *self.shape, len(self.dataset.classes), self._belongs.device, self.ranks)

    def in_context(self, predict: Predict, state: State) -> Tally:
        """Evaluate methods whose predictions depend on the whole batch. Each batch is from one group."""
        right = torch.zeros(self.shape, device=self._belongs.device)
        loss = torch.zeros(self.shape, dtype=self._wide, device=right.device)
        counter = self._counter()
        sizes = self._sizes.max(0)
        for group in range(self.shape[1]):
            self.on_batch(int(sizes[:group].sum()), int(sizes.sum()))
            if group % self.ranks.size != self.ranks.rank:
                continue
            for runs, members in self._members_of(group):
                states = _states_of(state, runs)
                for indices in torch.split(members, CONTEXT, dim=1):
                    logits, labels = predict(states, self.dataset.inputs(indices)), self.dataset.labels[indices]
                    is_right, losses = _score(logits, labels)
                    right[runs, group] += is_right.sum(1)
                    loss[runs, group] += losses.to(self._wide).sum(1)
                    if self.metrics:
                        counter.add(logits, labels, torch.full_like(labels, group), runs)
        return Tally(self.ranks.sum(right), self.ranks.sum(loss), counter.values())

    def _members_of(self, group: int) -> Iterator[tuple[Runs, Tensor]]:
        """Yield runs that are evaluated on equally many examples of a group, n, and these examples [K, n]."""
        for size, runs in self._runs_by_size[group]:
            members = torch.stack([_evenly_spaced(trial[group], size) for trial in self._members])
            yield runs, members[self._trial_of_run[runs]]

    def validation_loss(self, tally: Tally) -> Tensor:
        """The mean loss on the "out" splits of the training environments: [K]."""
        return torch.where(self._validation_weights > 0, tally.loss * self._validation_weights, 0.0).sum(1)

    def summary(self, tally: Tally) -> Tensor:
        """The "in" accuracies, the "out" accuracies and the validation loss of a tally: [K, G + 1]."""
        accuracies = tally.right.to(self._wide) / self._sizes_on_device
        columns = [accuracies[:, 0::2], accuracies[:, 1::2], self.validation_loss(tally).unsqueeze(1)]
        return torch.cat(columns, dim=1)

    def _weights_of_losses(self, specs: Sequence[RunSpec]) -> NDArray[np.float64]:
        """The weight of each group's loss in the validation loss: [K, G]."""
        weights = np.zeros(self._sizes.shape)
        for run, spec in enumerate(specs):
            groups = [2 * e + 1 for e in range(self._sizes.shape[1] // 2) if e not in spec.test_envs]
            weights[run, groups] = 1.0 / (len(groups) * self._sizes[run, groups])
        return weights

    def fractions(self, counts: Tensor) -> Accuracies:
        """Accuracies from counts [..., K, G]; waits for the device."""
        fractions = counts.cpu().numpy().astype(np.float64) / self._sizes
        return Accuracies(fractions[..., 0::2], fractions[..., 1::2])


def different_columns(bits: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct columns of a matrix of zeros and ones, sorted, and the index of each column among them.

    The same as `torch.unique` along dimension 1, but faster: `torch.unique` takes 0.1 s for 70,000 columns.
    """
    numbers = torch.zeros(bits.shape[1], dtype=torch.int64, device=bits.device)
    for rows in torch.split(bits, BITS):
        for row in rows:
            numbers = 2 * numbers + row
        numbers = torch.unique(numbers, return_inverse=True)[1]  # small again
    columns = torch.arange(len(numbers), device=bits.device)
    one_of_each = columns.new_empty(int(numbers.max()) + 1).scatter_(0, numbers, columns)
    return bits[:, one_of_each], numbers


def _kind(spec: RunSpec) -> Kind:
    """The kind of a run; runs of the same kind are evaluated on the same examples."""
    return spec.trial_seed, tuple(spec.test_envs)


def _evenly_spaced(members: Tensor, count: int) -> Tensor:
    """`count` evenly spaced examples, which are a fair sample even if the examples are sorted by class."""
    return members[torch.arange(count, device=members.device) * len(members) // count]


def _states_of(state: State, runs: Runs) -> State:
    """The states of some of the runs."""
    chosen: State = state if isinstance(runs, slice) else pytree.tree_map(lambda t: t[runs], state)
    return chosen


def _chunks(examples: Tensor, size: int, ranks: Ranks) -> Sequence[Tensor]:
    """Divide the examples of this process into chunks. All processes have equally many chunks."""
    own = examples[ranks.share(len(examples))]
    if ranks.size == 1:
        return torch.split(own, size)
    return torch.tensor_split(own, math.ceil(math.ceil(len(examples) / ranks.size) / size))


def _score(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """For logits [K, N, C], whether each prediction is correct (0 or 1) and its cross-entropy, both [K, N]."""
    labels = labels.expand(logits.shape[:-1])
    return (logits.argmax(-1) == labels).to(torch.float32), cross_entropy(logits, labels)


def _channels_last_on_cpu(x: Tensor) -> Tensor:
    """Convert images on a CPU to the channels-last format, with which convolutions are faster there."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 and x.device.type == "cpu" else x


def evaluation_steps(steps: int, every: int) -> Iterator[int]:
    """Yield the steps after which a run is evaluated: every `every` steps, and the last step."""
    yield from range(0, steps, every)
    if (steps - 1) % every:
        yield steps - 1
