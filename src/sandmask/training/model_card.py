"""A model card: what a model is, how it was trained and how good it is, as Markdown with the Hub's metadata."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import sandmask
from sandmask._text import counted, printable
from sandmask.records import RunRecord, RunSpec, averaged_spec, split_averages
from sandmask.records._averages import FULL_DATA
from sandmask.reports import Cell, build_report, run_command
from sandmask.selection import method_names

RULE = "training-domain"


@dataclass(frozen=True)
class CardFacts:
    """What a card is made from.

    `record` and `step` are those of the weights in the file, averages included; `runs` are all runs of the sweep, if
    the model is from one.
    """

    spec: RunSpec
    environments: tuple[str, ...]
    classes: tuple[str, ...]
    is_image: bool
    record: RunRecord | None
    step: int | None
    average: str | None = None
    runs: Sequence[RunRecord] = ()

    @property
    def held_out(self) -> str:
        """The names of the held-out environments."""
        return ", ".join(self.environments[env] for env in self.spec.test_envs)

    @property
    def method(self) -> str:
        """The algorithm, with the average of its weights if it is one."""
        return self.spec.algorithm + (f" + {self.average.upper()}" if self.average else "")

    @property
    def full_data(self) -> bool:
        """Whether the run trained on the examples that are held back for selection, too."""
        return float(self.spec.hparams.get(FULL_DATA, 0)) > 0

    @property
    def evaluation(self) -> int | None:
        """Which evaluation of the record is of this model; None if none is."""
        if self.record is None or not len(self.record.steps):
            return None
        if self.step is None:
            return len(self.record.steps) - 1
        found = np.flatnonzero(self.record.steps == self.step)
        return int(found[0]) if len(found) else None


def model_card(facts: CardFacts, name: str) -> str:
    """The card of a model.

    :param facts: what is known about it.
    :param name: what to load it by, such as "hf:me/my-model".
    """
    spec = facts.spec
    average = f" (weights averaged by {facts.average.upper()})" if facts.average else ""
    parts = [
        _metadata(facts),
        f"# {_plain(facts.method)} on {_plain(spec.dataset)}",
        (
            f"The network {_code(spec.network)}, trained with {_code(spec.algorithm)}{average} on "
            f"{_code(spec.dataset)} by sandmask {sandmask.__version__}. Held out: {_plain(facts.held_out)}."
        ),
        "## Accuracy",
        *_accuracy(facts),
        "## Use",
        _use(facts, name),
        "## Training",
        *_training(facts),
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(facts: CardFacts) -> str:
    """The front matter; JSON values are valid YAML."""
    task = "image-classification" if facts.is_image else "tabular-classification"
    lines = [
        "---",
        "library_name: sandmask",
        f"pipeline_tag: {task}",
        f"tags: {json.dumps(['sandmask', 'domain-generalization', facts.spec.algorithm])}",
        "metrics: [accuracy]",
    ]
    if (at := facts.evaluation) is not None and facts.record is not None:
        value = float(np.mean([facts.record.accuracy_in[at, env] for env in facts.spec.test_envs]))
        result = {
            "task": {"type": task},
            "dataset": {"name": facts.spec.dataset, "type": facts.spec.dataset},
            "metrics": [{"type": "accuracy", "value": value, "name": f"accuracy on {facts.held_out}, held out"}],
        }
        lines += ["model-index:", f"- name: {json.dumps(facts.method)}", f"  results: {json.dumps([result])}"]
    return "\n".join([*lines, "---"])


def _accuracy(facts: CardFacts) -> list[str]:
    record, at = facts.record, facts.evaluation
    if record is None or at is None:
        return ["The records of the run are not with the model, so its accuracy is not known."]
    rows = ["| environment | | training part | validation part |", "|---|---|---|---|"]
    trained = "trained on both parts" if facts.full_data else "trained on the training part"
    for env, name in enumerate(facts.environments):
        role = "held out" if env in facts.spec.test_envs else trained
        inside, outside = record.accuracy_in[at, env], record.accuracy_out[at, env]
        rows.append(f"| {_plain(name)} | {role} | {inside:.1%} | {outside:.1%} |")
    return ["\n".join(rows), _selection(facts, record, at), *_over_trials(facts)]


def _selection(facts: CardFacts, record: RunRecord, at: int) -> str:
    step = f"The model is the one after step {record.steps[at]} of {facts.spec.steps - 1}"
    validation = record.accuracy_out[:, list(record.train_envs)].mean(axis=1)
    if at == int(validation.argmax()) and not facts.full_data:
        return (
            f"{step}, which has the best mean accuracy on the validation parts of the training environments ({RULE} "
            "selection)."
        )
    return f"{step}; it was not selected among the run's checkpoints."


def _over_trials(facts: CardFacts) -> list[str]:
    """What the method achieves in the sweep, with its error."""
    cell = _cell(facts)
    if cell is None or cell.mean is None:
        return ["The error over repetitions is not known."]
    error = f" ± {cell.error:.1f}" if cell.error is not None else ""
    trials, runs = counted(len(cell.values), "trial"), counted(cell.have, "run")
    said = (
        f"In the sweep that this run is part of, {_plain(facts.method)} achieves **{cell.mean:.1f}{error}%** on "
        f"{_plain(facts.held_out)}: the mean and its standard error over {trials}, with {RULE} selection among "
        f"{runs}. The selection does not use {_plain(facts.held_out)}."
    )
    return [said]


def _cell(facts: CardFacts) -> Cell | None:
    if not facts.runs or len(facts.spec.test_envs) != 1 or facts.full_data:  # whose selection takes another sweep
        return None
    method = method_names(split_averages(facts.runs)).get(averaged_spec(facts.spec, facts.average).id)
    tables = build_report(facts.runs, [RULE]).rules[0].datasets
    if facts.spec.dataset not in tables or method is None:
        return None
    return tables[facts.spec.dataset].cells.get((method, facts.environments[facts.spec.test_envs[0]]))


def _use(facts: CardFacts, name: str) -> str:
    example = '["photo.jpg"]' if facts.is_image else "x"
    comment = "names of classes" if facts.is_image else "x: float32 [N, *run.input_shape]"
    return (
        "```python\nimport sandmask\n\n"
        f"run = sandmask.load_run({json.dumps(name)})\n"
        f"run.classify({example})  # {comment}\n```\n\n"
        f"Classes: {', '.join(_plain(each) for each in facts.classes)}."
    )


def _training(facts: CardFacts) -> list[str]:
    command = run_command(facts.spec, facts.environments)
    if not command:
        return ["The weights are a mean of several runs."]
    return [f"```console\n$ {command}\n```"]


def _plain(text: str) -> str:
    """A name in a line or a table of Markdown."""
    escaped = printable(text)
    for mark in "\\`*_[]<>|#":
        escaped = escaped.replace(mark, f"\\{mark}")
    return escaped


def _code(text: str) -> str:
    return f"`{printable(text).replace('`', chr(39))}`"
