"""`sandmask.soup`: combine the models of a sweep."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandmask._arguments import Names, PathLike, checked, names_in
from sandmask._text import tell
from sandmask.api._images import allowances
from sandmask.api._progress import ShowProgress, choose_screen, one_by_one
from sandmask.api._swept import Sweep, of_averages
from sandmask.datasets import Dataset, load_dataset
from sandmask.errors import SandmaskError
from sandmask.records import read_runs, write_record
from sandmask.selection import spoken_soup
from sandmask.sweeps import SOUPS, Candidates, Soup, candidates, expand, make_soup, parse_soups, why_not
from sandmask.sweeps._soup import validation_of
from sandmask.training import WEIGHTS, choose_device, parse_averages
from sandmask.training.folder import MODEL, RECORDS
from sandmask.training.model_file import save_model

if TYPE_CHECKING:
    import pandas as pd
    import torch
FOLDER = "soups"  # in the sweep's folder
COLUMNS = (
    *("dataset", "algorithm", "average", "soup", "test_env", "trial_seed", "members", "candidates"),
    *("validation", "held_out", "folder"),
)


@checked
def soup(
    folder: PathLike,
    kinds: Names | None = None,
    *,
    of: Names | None = None,
    device: "str | torch.device | None" = None,
    data_dir: PathLike | None = None,
    skip_corrupt: bool = False,
    allow_missing_classes: bool = False,
    plugins: Sequence[PathLike] = (),
    progress: ShowProgress = True,
) -> "pd.DataFrame":
    """Combine the kept models of a sweep: those of all draws, for each method, held-out environment and trial.

    Train the sweep with `keep_models="best"` or "last". Means of weights also need `shared_init=True`. The results are
    records in the folder's `soups`, which reports show as methods of their own, such as `ERM + greedy soup`. Call this
    again after the sweep was extended.

    "t3a" and "unidg" do not combine models: the best model adapts to unlabelled examples of the domain on which it is
    evaluated. T3A (Iwasawa and Matsuo, 2021) adapts the classifier, and UniDG (Zhang et al., 2023) also trains the
    network. Their results are not comparable with those of other methods, which do not see these examples.

        sandmask.sweep("runs/pacs", "PACS", "ERM", keep_models="best", shared_init=True, averages="sma")
        sandmask.soup("runs/pacs")
        print(sandmask.report("runs/pacs"))

    :param folder: the sweep's folder.
    :param kinds: "uniform" (mean of all weights), "greedy" (mean of those that help on validation data) and "ensemble"
        (mean of the logits), all three by default; "t3a" and "unidg".
    :param of: what to combine: "weights", and averages that the sweep kept, such as "sma"; everything if not given.
    :param device: "cpu", "cuda", "cuda:1"; a GPU if there is one.
    :param data_dir: folder of the datasets.
    :param skip_corrupt: skip images that cannot be read.
    :param allow_missing_classes: allow image domains that lack some of the classes.
    :param plugins: Python files that register algorithms or datasets.
    :param progress: show progress in a terminal or a notebook. "lines" also prints a line every ten seconds elsewhere.
    :return: a row for each soup, with the number of members, its validation accuracy, and its accuracy on the held-out
        environment.
    """
    import pandas as pd

    screen = choose_screen(progress)
    swept = Sweep.read(folder, plugins)
    if swept.full_data:
        raise SandmaskError(
            f"The runs in {folder} have full_data=1 and trained on the validation examples, by which the members of a "
            "soup are chosen. Combine the runs of the sweep without full_data."
        )
    chosen = SOUPS if kinds is None else parse_soups(names_in(kinds))
    kept = candidates(Path(folder), swept.records())
    if not kept:
        raise SandmaskError(f"{folder} holds no models to combine. Train the sweep with --keep-models best, or last.")
    found = _wanted(kept, None if of is None else names_in(of))
    allowed = allowances(skip_corrupt=skip_corrupt, allow_missing_classes=allow_missing_classes)
    sources, where = expand(swept.spec).sources, choose_device(device)

    @lru_cache(maxsize=1)  # the cells of a dataset follow each other
    def load(name: str) -> Dataset:
        return load_dataset(sources[name], data_dir, **allowed)

    changed = dict.fromkeys(cell.spec.dataset for cell in found if cell.spec.dataset not in sources)
    possible = [(cell, *_possible(cell, chosen)) for cell in found if cell.spec.dataset in sources]
    soups = [(cell, kind) for cell, kinds, _ in possible for kind in kinds]
    notes = [f"No soup of {name} is possible: its files have changed since its runs were trained." for name in changed]
    notes += dict.fromkeys(note for *_, refused in possible for note in refused)
    if not soups:
        raise SandmaskError(" ".join(notes))
    for note in notes:
        tell(f"note: {note}")
    rows = []
    for cell, kind in one_by_one(soups, "results", screen):
        made = make_soup(cell, kind, load(cell.spec.dataset), where)
        rows.append(_write(cell, made, Path(folder) / FOLDER))
    return of_averages(pd.DataFrame(rows, columns=list(COLUMNS)))


def made_soups(folder: Path) -> tuple[str, ...]:
    """The kinds of soups that were made of the models of a sweep."""
    found = read_runs(folder / FOLDER) if (folder / FOLDER).is_dir() else []
    return parse_soups(run.spec.options["soup"] for run in found)


def _wanted(found: Sequence[Candidates], of: Sequence[str] | None) -> list[Candidates]:
    """The cells with the requested kinds of weights."""
    if of is None:
        return list(found)
    averages = parse_averages([name for name in of if name != WEIGHTS])
    kinds = (*averages, WEIGHTS) if WEIGHTS in of else averages
    wanted = [cell for cell in found if cell.members[0].model.kind in kinds]
    if not wanted:
        there = ", ".join(dict.fromkeys(cell.members[0].model.kind for cell in found))
        raise SandmaskError(f"The sweep kept no {' or '.join(kinds)}. Choose from: {there}.")
    return wanted


def _possible(cell: Candidates, kinds: Sequence[str]) -> tuple[list[str], list[str]]:
    """The kinds of soups that are possible for a cell, and notes on the others."""
    reasons = {kind: why_not(cell, kind) for kind in kinds}
    of = f"of {cell.spec.algorithm} on {cell.spec.dataset}"
    notes = [
        f"No {' or '.join(spoken_soup(kind) for kind in kinds if reasons[kind] == reason)} {of} is possible: {reason}."
        for reason in dict.fromkeys(reasons.values())
        if reason is not None
    ]
    return [kind for kind in kinds if reasons[kind] is None], notes


def _write(cell: Candidates, made: Soup, parent: Path) -> tuple[Any, ...]:
    """Write a soup to a folder of its own below `parent`, in the layout of a run. Return its row of the table."""
    record, spec = made.record, made.record.spec
    envs = "-".join(map(str, spec.test_envs))
    words = [Path(spec.dataset).name, spec.algorithm, *(spec.options.get(name) for name in ("average", "soup"))]
    folder = parent / "-".join([*filter(None, words), f"env{envs}", f"trial{spec.trial_seed}"])
    # The records are removed first and written last: if they are there, the soup is complete.
    (folder / RECORDS).unlink(missing_ok=True)
    (folder / MODEL).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if made.state is not None:
        save_model(folder / MODEL, made.stack.algorithm, made.state, spec, "done", made.stack.dataset)
    write_record(record, folder / RECORDS)
    held_out = ", ".join(record.env_names[env] for env in spec.test_envs)
    accuracy = float(record.accuracy_in[0, list(spec.test_envs)].mean())
    return (
        *(spec.dataset, spec.algorithm, spec.options.get("average"), spec.options["soup"], held_out, spec.trial_seed),
        *(len(made.members), len(cell.members), validation_of(record, int(record.steps[0])), accuracy, str(folder)),
    )
