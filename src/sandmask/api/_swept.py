"""A sweep in its folder: records, tables, models and status."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandmask._arguments import PathLike
from sandmask._text import counted, in_shell
from sandmask.errors import SandmaskError
from sandmask.plugins import load_plugins
from sandmask.records import RunRecord, RunSpec, load_records, read_runs
from sandmask.reports import Report, cell_text, report
from sandmask.sweeps import Expansion, SweepFolder, SweepSpec, SweepStatus, expand, open_search, sweep_status
from sandmask.sweeps._soup import models_with_records, validation_of

if TYPE_CHECKING:
    import pandas as pd

_MODEL_COLUMNS = (
    *("run", "dataset", "algorithm", "test_envs", "trial_seed", "hparams_seed"),
    *("average", "step", "validation", "file"),
)


@dataclass(frozen=True)
class Sweep:
    """A sweep in a folder. A notebook shows its table.

    `spec` describes the sweep, and `runs` are all of its runs. `trained` counts the runs that the call trained or
    waited for. `failed` has the ids of runs that could not be trained, with the reasons. `left` counts the runs that a
    time limit left for later.
    """

    folder: Path
    spec: SweepSpec
    runs: tuple[RunSpec, ...] = field(repr=False)
    trained: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    left: int = 0

    @classmethod
    def read(cls, folder: PathLike, plugins: Iterable[PathLike] = ()) -> "Sweep":
        """Read the sweep in a folder. It may be training in another process.

        :param folder: the sweep's folder.
        :param plugins: Python files that register its algorithms or datasets.
        """
        load_plugins(map(Path, plugins))
        spec = SweepFolder(Path(folder)).read_spec()
        if spec is None:
            raise SandmaskError(
                f"{folder} holds no sweep. Start one with: sandmask sweep run {in_shell(folder)} --datasets ..."
            )
        return cls(Path(folder), spec, all_runs(SweepFolder(Path(folder)), spec, expand(spec)))

    def status(self) -> SweepStatus:
        """The current status of the sweep."""
        folder, searches = SweepFolder(self.folder), self.spec.search != "none"
        return sweep_status(folder, all_runs(folder, self.spec, expand(self.spec)) if searches else self.runs)

    def records(self) -> list[RunRecord]:
        """The records of the runs that are done."""
        return read_runs(self.folder)

    def frame(self, *, hparams: bool = True) -> "pd.DataFrame":
        """Every evaluation of every run: the frame of `sandmask.load_records`.

        :param hparams: include the hyperparameters, which repeat on every row.
        """
        return load_records(self.folder, hparams=hparams)

    def report(self, selection: str | Sequence[str] | None = None, **settings: Any) -> Report:
        """The tables of the sweep.

        :param selection: selection rules; those of the sweep if not given.
        :param settings: other arguments of `sandmask.report`.
        """
        return report(self.folder, selection or self.spec.selection, **settings)

    def models(self) -> "pd.DataFrame":
        """The models that the sweep kept: a row for each run and kind of weights.

        Columns: run, dataset, algorithm, test_envs, trial_seed, hparams_seed, average (None for the weights
        themselves), step, validation (mean "out" accuracy of the training environments at that step) and file.
        `sandmask.load_run(folder, run=..., average=...)` loads one.
        """
        import pandas as pd

        rows = []
        for model, record in models_with_records(self.folder, self.records()):
            spec, envs = model.spec, ",".join(map(str, model.spec.test_envs))
            validation = None if record is None else validation_of(record, model.step)
            run = (spec.id, spec.dataset, spec.algorithm, envs, spec.trial_seed, spec.hparams_seed)
            rows.append((*run, model.average, model.step, validation, str(model.file)))
        return of_averages(pd.DataFrame(rows, columns=list(_MODEL_COLUMNS)))

    def table(self) -> "pd.DataFrame":
        """The accuracy on held-out environments in percent, as text: a row for each dataset and algorithm.

        There is a column for each selection rule. A number is the mean over environments and trials, with its standard
        error. If some environments were not held out, it says how many were.
        """
        import pandas as pd

        built = self.report()
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for rule in built.rules:
            for dataset, table in rule.datasets.items():
                for method in table.methods:
                    rows.setdefault((dataset, method), {})[rule.rule] = cell_text(table.averages[method])
        index = pd.MultiIndex.from_tuples(list(rows), names=["dataset", "algorithm"])
        return pd.DataFrame(list(rows.values()), index=index, columns=[rule.rule for rule in built.rules]).fillna("-")

    @property
    def full_data(self) -> bool:
        """Whether runs train on all data. Tables of such runs also need the first-stage sweep."""
        return self.spec.full_data

    def __fspath__(self) -> str:
        """The folder, so that a sweep can be passed where a folder is expected, as in `sandmask.report(sweep)`."""
        return str(self.folder)

    def __repr__(self) -> str:
        return f"Sweep({str(self.folder)!r}, {counted(len(self.runs), 'run')}, {len(self.failed)} failed)"

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        status = self.status()
        said = f"<p>{status.done}/{status.planned} runs done. Held-out accuracy in percent, mean over environments:</p>"
        failed = (
            f"<p>Not trained: {counted(len(self.failed), 'run')}; see <code>failed</code>.</p>" if self.failed else ""
        )
        return said + (self.table().to_html(border=0) if status.done and not self.full_data else "") + failed


def all_runs(folder: SweepFolder, spec: SweepSpec, expansion: Expansion) -> tuple[RunSpec, ...]:
    """All runs of a sweep in a folder, with the proposals of a search so far. Nothing is written."""
    search = open_search(folder, spec, expansion) if folder.journal.exists() else None
    return expansion.runs if search is None else search.runs()


def of_averages(models: "pd.DataFrame") -> "pd.DataFrame":
    """Replace NaN in the column `average` by None, as `load_run` takes it."""
    averages = models["average"].astype(object)
    return models.assign(average=averages.where(averages.notna(), None))
