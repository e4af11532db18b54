"""Soups and ensembles: combine the kept models of a cell of a sweep, which differ in hyperparameters.

A **soup** is the mean of the weights of runs that started from the same weights (Wortsman et al., 2022; DiWA, Rame et
al., 2022). The uniform soup takes every run. The greedy one adds runs in the order of their validation accuracy, and
keeps those with which the validation accuracy of the mean does not fall. An **ensemble** is the mean of the runs'
logits; of averaged weights, it is an ensemble of averages (EoA, Arpit et al., 2022). T3A and UniDG are the best model
alone, which adapts to the test examples: see `_t3a` and `_unidg`.

Members are chosen on the "out" splits of the training environments. The held-out environment is only reported.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sandmask._devices import widest_float
from sandmask.algorithms import Algorithm, State
from sandmask.datasets import Dataset
from sandmask.functional.ranks import Ranks
from sandmask.hparams import seed_hash
from sandmask.records import RunRecord, RunSpec, averaged_spec, recorded_measures, split_averages
from sandmask.registry import check_known
from sandmask.selection import ADAPTATIONS, mean_over_environments
from sandmask.sweeps._t3a import SUPPORTS, Classified
from sandmask.sweeps._unidg import tuned
from sandmask.training import KeptModel, Stack, StackModels, kept_models
from sandmask.training.evaluation import Evaluator, Tally
from sandmask.training.history import History
from sandmask.training.model_file import build_algorithm
from sandmask.training.precision import temporary_precision
from sandmask.training.specs import INIT, SHAPE_HPARAMS, SHARED

UNIFORM, GREEDY, ENSEMBLE, T3A = "uniform", "greedy", "ensemble", "t3a"
SOUPS = (UNIFORM, GREEDY, ENSEMBLE)
KINDS = (*SOUPS, *ADAPTATIONS)  # those that see test examples are made on request only

Model = tuple[Algorithm, State]


@dataclass(frozen=True)
class Member:
    """A kept model, the validation accuracy that it was kept with, and the metrics that its run recorded."""

    model: KeptModel
    validation: float
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidates:
    """The kept models of one cell and trial, in order of decreasing validation accuracy, then of decreasing draws."""

    members: tuple[Member, ...]

    @property
    def spec(self) -> RunSpec:
        """The spec of the best member, as reports show it."""
        best = self.members[0].model
        return averaged_spec(best.spec, best.average)


def parse_soups(names: Iterable[str]) -> tuple[str, ...]:
    """Check names of kinds of soups and return them in the order of `KINDS`.

    :param names: "uniform", "greedy", "ensemble", "t3a", "unidg".
    """
    asked = list(names)
    for name in asked:
        check_known("kind of soup", name, KINDS)
    return tuple(name for name in KINDS if name in asked)


def candidates(folder: Path, runs: Iterable[RunRecord]) -> list[Candidates]:
    """Return the cells of kept models: one for each dataset, method, held-out environment, trial and average.

    :param folder: the sweep's folder.
    :param runs: records of the runs.
    """
    found: defaultdict[tuple[object, ...], list[Member]] = defaultdict(list)
    for model, record in models_with_records(folder, runs):
        if record is None or not record.train_envs:
            continue
        spec = model.spec
        key = (spec.dataset, spec.algorithm, spec.network, spec.test_envs, spec.trial_seed, model.kind)
        found[key].append(Member(model, validation_of(record, model.step), tuple(recorded_measures([record]))))
    ordered = (sorted(some, key=lambda m: (-m.validation, -m.model.spec.hparams_seed)) for some in found.values())
    return [Candidates(tuple(members)) for members in ordered]


def models_with_records(folder: Path, runs: Iterable[RunRecord]) -> list[tuple[KeptModel, RunRecord | None]]:
    """The kept models of a sweep, each with the record that has an evaluation of it, if there is one."""
    records = {record.spec.id: record for record in split_averages(runs)}
    found = []
    for model in kept_models(folder):
        record = records.get(model.shown_id)
        is_evaluated = record is not None and model.step in record.steps
        found.append((model, record if is_evaluated else None))
    return found


def validation_of(record: RunRecord, step: int) -> float:
    """The mean "out" accuracy over the training environments at an evaluated step."""
    row = int(np.searchsorted(record.steps, step))
    return float(mean_over_environments(record.accuracy_out[:, record.train_envs])[row])


def why_not(cell: Candidates, kind: str) -> str | None:
    """Return the reason why a cell can have no soup of a kind; None if it can.

    :param cell: the models.
    :param kind: "uniform", "greedy", "ensemble", "t3a" or "unidg".
    """
    if kind in ADAPTATIONS:
        return _why_not_adapted(cell.members[0])
    return None if kind == ENSEMBLE else _why_no_mean(cell)


def _why_no_mean(cell: Candidates) -> str | None:
    """The reason why the weights of a cell's models have no meaningful mean."""
    specs = [member.model.spec for member in cell.members]
    if any(spec.options.get(INIT) != SHARED for spec in specs):
        return "its runs start from different weights; train the sweep with --shared-init"
    for name in (*SHAPE_HPARAMS, "init_scale"):
        values = {spec.hparams.get(name) for spec in specs}
        if len(values) > 1 and name != "batch_size":
            return f"its draws differ in {name}; fix it with --hparam {name}=..."
    return None


def _why_not_adapted(member: Member) -> str | None:
    """The reason why a model cannot adapt to test examples."""
    info = _file_of(member).info(member.model)
    algorithm = build_algorithm(info.spec, info, weights="none", dropout=False)
    linear = algorithm.is_network and not algorithm.network.nonlinear
    return None if linear else "its predictions are not those of a linear classifier"


@dataclass(frozen=True)
class Soup:
    """The soup of a cell: its record, its members, the stack that evaluated it, and the state if it is a mean."""

    record: RunRecord
    members: tuple[KeptModel, ...]
    stack: Stack
    state: State | None


def make_soup(cell: Candidates, kind: str, dataset: Dataset, device: torch.device) -> Soup:
    """Combine the models of a cell.

    :param cell: the models.
    :param kind: "uniform", "greedy", "ensemble", "t3a" or "unidg".
    :param dataset: the dataset.
    :param device: where to evaluate.
    """
    cell = Candidates(cell.members[:1]) if kind in ADAPTATIONS else cell
    spec = _soup_spec(cell, kind)
    metrics = [name for name in cell.members[0].metrics if all(name in one.metrics for one in cell.members)]
    with temporary_precision(spec.precision):
        stack = Stack([spec], dataset, device, weights="none", metrics=metrics)
        chosen, state = list(cell.members), None
        if kind in ADAPTATIONS:
            record = _adapted(stack, _model(chosen[0], device), kind)
        elif kind == ENSEMBLE:
            record = _evaluated(stack, [_model(member, device) for member in chosen])
        else:
            chosen = _greedy(stack, chosen) if kind == GREEDY else chosen
            state = _mean(stack, chosen)
            record = _evaluated(stack, [(stack.algorithm, state)])
    members = tuple(member.model for member in chosen)
    final = replace(
        record.spec,
        hparams={**record.spec.hparams, "members": float(len(members))},
        seed=seed_hash(*(model.shown_id for model in members)),
    )
    return Soup(replace(record, spec=final), members, stack, state)


def _soup_spec(cell: Candidates, kind: str) -> RunSpec:
    """The best member's spec, with the hyperparameters that all members share and those that decide shapes."""
    specs = [member.model.spec for member in cell.members]
    shared = {
        name: value
        for name, value in cell.spec.hparams.items()
        if name in SHAPE_HPARAMS or all(spec.hparams.get(name) == value for spec in specs)
    }
    return replace(cell.spec, hparams=shared, hparams_seed=0, options={**cell.spec.options, "soup": kind})


def _greedy(stack: Stack, members: Sequence[Member]) -> list[Member]:
    """The members of a greedy soup, from members in the order of their validation accuracy."""

    def validation(some: Sequence[Member]) -> float:
        record = _evaluated(stack, [(stack.algorithm, _mean(stack, some))])
        return validation_of(record, int(record.steps[0]))

    chosen = [members[0]]
    best = validation(chosen)
    for member in members[1:]:
        value = validation([*chosen, member])
        if value >= best:
            chosen, best = [*chosen, member], value
    return chosen


def _mean(stack: Stack, members: Sequence[Member]) -> State:
    """The mean of the averaged entries of members' states; other entries are the best member's."""
    states = (_file_of(member).state(member.model, stack.algorithm, stack.device) for member in members)
    state = next(states)
    total = {entry: state[entry].to(widest_float(stack.device)) for entry in stack.algorithm.averaged}
    for more in states:
        total = {entry: value + more[entry].to(value.dtype) for entry, value in total.items()}
    return {**state, **{e: (value / len(members)).to(state[e].dtype) for e, value in total.items()}}


def _model(member: Member, device: torch.device) -> Model:
    """A member's own algorithm, whose shapes may differ from those of other members, and its state."""
    models = _file_of(member)
    info = models.info(member.model)
    algorithm = build_algorithm(info.spec, info, weights="none", dropout=False).to(device)
    return algorithm, models.state(member.model, algorithm, device)


def _file_of(member: Member) -> StackModels:
    return _read(member.model.file, member.model.file.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read(file: Path, stamp: int) -> StackModels:  # noqa: ARG001 - a file that was replaced is read again
    return StackModels(file)


@torch.no_grad()
def _evaluated(stack: Stack, models: Sequence[Model]) -> RunRecord:
    """Evaluate the mean of the models' logits: a record with one evaluation, at the last step."""
    evaluator, in_context = stack.evaluator, stack.algorithm.uses_context

    def predict(_: State, x: Tensor) -> Tensor:
        x = x[0] if in_context else x  # there is one run
        return torch.stack([algorithm.predict(state, x) for algorithm, state in models]).mean(0, keepdim=True)

    return _record(stack, (evaluator.in_context if in_context else evaluator.alone)(predict, {}))


def _adapted(stack: Stack, model: Model, kind: str) -> RunRecord:
    """Evaluate T3A or UniDG of a model, with the first of the settings with the highest validation accuracy."""
    plain = Classified.by(*model, stack.dataset, stack.specs[0])
    tried = []
    for settings, classified in [({}, plain)] if kind == T3A else tuned(*model, plain):
        for supports in SUPPORTS:
            record = _of_logits(stack, classified.adapted(supports))
            hparams = {**record.spec.hparams, **settings, "supports": float(supports)}
            tried.append(replace(record, spec=replace(record.spec, hparams=hparams)))
    return max(tried, key=lambda record: validation_of(record, int(record.steps[0])))


def _of_logits(stack: Stack, logits: Dataset) -> RunRecord:
    """Evaluate logits, which are the inputs of a dataset."""
    metrics, size = stack.evaluator.metrics, len(logits.labels)
    evaluator = Evaluator(logits, stack.specs, stack.device, lambda _: size, metrics, Ranks())
    return _record(stack, evaluator.alone(lambda _, rows: rows.unsqueeze(0), {}))


def _record(stack: Stack, tally: Tally) -> RunRecord:
    """A record with one evaluation, at the last step."""
    history, step = History(stack), stack.specs[0].steps - 1
    now = {"validation_loss": stack.evaluator.validation_loss(tally), **tally.measured}
    history.write(step, tally.right, {}, now)
    return history.records(step + 1, torch.full((1,), -1), {})[0].at(slice(-1, None))
