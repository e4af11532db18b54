"""Model cards: a description of a model, its training and its accuracy, as Markdown with the Hub's metadata."""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

import sandmask
from sandmask._text import counted, printable
from sandmask.records import RunRecord, averaged_spec, split_averages
from sandmask.records._averages import FULL_DATA
from sandmask.reports import Cell, build_report, run_command
from sandmask.selection import method_names, training_domain

if TYPE_CHECKING:
    from sandmask.training.trained_run import TrainedRun

RULE = "training-domain"


class ModelCard:
    """The model card of a run. If the model is from a sweep, `runs` are all runs of the sweep.

    `record` is the record of the weights in the file, which may be averaged; None if it is not known.
    """

    def __init__(self, run: "TrainedRun", record: RunRecord | None, runs: Sequence[RunRecord]) -> None:
        self.info, self.spec = run.info, run.spec
        self.record, self.runs = record, runs
        self.is_image = run.info.preprocessing.kind == "image"
        self.average = run.info.average.upper() if run.info.average else None
        self.method = self.spec.algorithm + (f" + {self.average}" if self.average else "")
        self.held_out = ", ".join(run.environments[env] for env in self.spec.test_envs)
        # Whether the run also trained on the examples that are normally held back for selection.
        self.full_data = float(self.spec.hparams.get(FULL_DATA, 0)) > 0

    def text(self, name: str) -> str:
        """The card as Markdown.

        :param name: the name by which to load the model, such as "hf:me/my-model".
        """
        average = f" (weights averaged by {self.average})" if self.average else ""
        command = run_command(self.spec, self.info.environments)
        parts = [
            self._metadata(),
            f"# {_plain(self.method)} on {_plain(self.spec.dataset)}",
            (
                f"The network {_code(self.spec.network)}, trained with {_code(self.spec.algorithm)}{average} on "
                f"{_code(self.spec.dataset)} by sandmask {sandmask.__version__}. Held out: {_plain(self.held_out)}."
            ),
            "## Accuracy",
            *self._accuracy(),
            "## Use",
            self._use(name),
            "## Training",
            f"```console\n$ {command}\n```" if command else "The weights are a mean of several runs.",
        ]
        return "\n\n".join(parts) + "\n"

    def _evaluation(self) -> int | None:
        """The index of this model's evaluation in the record; None if there is none."""
        if self.record is None or not len(self.record.steps):
            return None
        if self.info.step is None:
            return len(self.record.steps) - 1
        found = np.flatnonzero(self.record.steps == self.info.step)
        return int(found[0]) if len(found) else None

    def _metadata(self) -> str:
        """The front matter; JSON values are valid YAML."""
        task = "image-classification" if self.is_image else "tabular-classification"
        lines = [
            "---",
            "library_name: sandmask",
            f"pipeline_tag: {task}",
            f"tags: {json.dumps(['sandmask', 'domain-generalization', self.spec.algorithm])}",
            "metrics: [accuracy]",
        ]
        if (at := self._evaluation()) is not None and self.record is not None:
            value = float(np.mean([self.record.accuracy_in[at, env] for env in self.spec.test_envs]))
            result = {
                "task": {"type": task},
                "dataset": {"name": self.spec.dataset, "type": self.spec.dataset},
                "metrics": [{"type": "accuracy", "value": value, "name": f"accuracy on {self.held_out}, held out"}],
            }
            lines += ["model-index:", f"- name: {json.dumps(self.method)}", f"  results: {json.dumps([result])}"]
        return "\n".join([*lines, "---"])

    def _accuracy(self) -> list[str]:
        record, at = self.record, self._evaluation()
        if record is None or at is None:
            return ["The accuracy is not known, because the records of the run are missing."]
        rows = ["| environment | | training part | validation part |", "|---|---|---|---|"]
        trained = "trained on both parts" if self.full_data else "trained on the training part"
        for env, name in enumerate(self.info.environments):
            role = "held out" if env in self.spec.test_envs else trained
            inside, outside = record.accuracy_in[at, env], record.accuracy_out[at, env]
            rows.append(f"| {_plain(name)} | {role} | {inside:.1%} | {outside:.1%} |")
        return ["\n".join(rows), self._selection(record, at), self._over_trials()]

    def _selection(self, record: RunRecord, at: int) -> str:
        step = f"The model is from step {record.steps[at]} of {self.spec.steps - 1}"
        best = training_domain(record)
        if best is not None and at == best.index and not self.full_data:
            return (
                f"{step}, which has the best mean accuracy on the validation parts of the training environments "
                f"({RULE} selection)."
            )
        return f"{step}; it was not selected among the run's checkpoints."

    def _over_trials(self) -> str:
        """The accuracy of the method in the sweep, with its error."""
        cell = self._cell()
        if cell is None or cell.mean is None:
            return "The error over repetitions is not known."
        error = f" ± {cell.error:.1f}" if cell.error is not None else ""
        trials, runs = counted(len(cell.values), "trial"), counted(cell.have, "run")
        return (
            f"In the sweep that this run is part of, {_plain(self.method)} achieves **{cell.mean:.1f}{error}%** on "
            f"{_plain(self.held_out)}: the mean and its standard error over {trials}, with {RULE} selection among "
            f"{runs}. The selection does not use {_plain(self.held_out)}."
        )

    def _cell(self) -> Cell | None:
        spec = self.spec
        if not self.runs or len(spec.test_envs) != 1 or self.full_data:  # another sweep selects runs with full_data
            return None
        method = method_names(split_averages(self.runs)).get(averaged_spec(spec, self.info.average).id)
        tables = build_report(self.runs, [RULE]).rules[0].datasets
        if spec.dataset not in tables or method is None:
            return None
        return tables[spec.dataset].cells.get((method, self.info.environments[spec.test_envs[0]]))

    def _use(self, name: str) -> str:
        example = '["photo.jpg"]' if self.is_image else "x"
        comment = "names of classes" if self.is_image else "x: float32 [N, *run.input_shape]"
        return (
            "```python\nimport sandmask\n\n"
            f"run = sandmask.load_run({json.dumps(name)})\n"
            f"run.classify({example})  # {comment}\n```\n\n"
            f"Classes: {', '.join(_plain(each) for each in self.info.classes)}."
        )


def _plain(text: str) -> str:
    """A name in a line or a table of Markdown."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", printable(text))


def _code(text: str) -> str:
    return f"`{printable(text).replace('`', chr(39))}`"
