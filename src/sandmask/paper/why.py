"""Tables of the same records under other choices, to explain why our cells may differ from the printed ones.

Each question is answered by a table of averages over environments.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sandmask.errors import SandmaskError
from sandmask.paper._compare import PRINTED_AS, printed_row
from sandmask.paper._printed import environments, printed
from sandmask.paper._product import Product
from sandmask.paper._select import Pick, alone, averages, by_rule, every, tied, trial_choices, validation
from sandmask.paper.why_spirals import contrary, signatures, spiral_draws, spiral_found
from sandmask.records import RunRecord
from sandmask.reports import Cell, Grid, cell_text
from sandmask.selection import Selected, is_settled

_Column = tuple[str, dict[str, tuple[float, float | None] | None]]
THRESHOLDS = (0.0, 0.25, 0.5, 0.75, 1.0)
INTERVALS = (10, 50, 100, 300, 1000)


def why(runs: Sequence[RunRecord], dataset: str, questions: Sequence[str] = ()) -> Product:
    """Answer questions about the table of a dataset, or all questions if none is named."""
    known = {**QUESTIONS, **SPIRALS_QUESTIONS} if dataset == "Spirals" else QUESTIONS
    unknown = [name for name in questions if name not in known]
    if unknown:
        raise SandmaskError(f"Unknown question {unknown[0]!r} about {dataset}. Choose one of {', '.join(known)}.")
    mine = [run for run in runs if run.spec.dataset == dataset]
    if not mine:
        raise SandmaskError(f"There are no runs on {dataset} among these records.")
    grids = tuple(known[name](mine, dataset) for name in questions or known)
    return Product(f"why-{dataset}", f"Why {dataset} differs", grids=grids)


def pick_tied(checkpoint: str, draw: str) -> Pick:
    """Select by training-domain validation with another way to break ties.

    :param checkpoint: "first", "last", "worst" or "best" of the tied checkpoints. The last two compare the accuracy on
        the test environment, which a rule must not use. They show the range of results that ties leave open.
    :param draw: the same for tied draws.
    """

    def pick(runs: Sequence[RunRecord], test_env: int) -> Selected | None:
        offers = []
        for run in alone(runs, test_env):
            indices = tied(run)
            index = _chosen(indices, run.accuracy_in[indices, test_env], checkpoint)
            offers.append(Selected(run, index, (float(validation(run)[index]),), test_env))
        if not offers:
            return None
        best = max(offer.value for offer in offers)
        level = [offer for offer in offers if offer.value == best]
        accuracies = np.array([offer.test_accuracy for offer in level])
        return level[_chosen(np.arange(len(level)), accuracies, draw)]

    return pick


def _chosen(places: NDArray[np.int64], accuracy: NDArray[np.float64], how: str) -> int:
    ends = {"first": 0, "last": len(places) - 1, "worst": int(accuracy.argmin()), "best": int(accuracy.argmax())}
    return int(places[ends[how]])


def tie_breaking(runs: Sequence[RunRecord], dataset: str) -> Grid:
    """Make a table of training-domain averages with other ways to break ties between checkpoints and draws."""
    ways = {
        "ours: first checkpoint, last draw": ("first", "last"),
        "first, first": ("first", "first"),
        "last, last": ("last", "last"),
        "last, first": ("last", "first"),
        "unluckiest": ("worst", "worst"),
        "luckiest": ("best", "best"),
    }
    columns = [(name, _averages(runs, dataset, pick_tied(*way))) for name, way in ways.items()]
    share = np.mean([len(tied(run)) > 1 for run in runs if is_settled(run) and len(run.steps)])
    note = f"Of all runs, {100 * share:.0f}% have more than one checkpoint at their highest validation accuracy."
    limits = "Unluckiest and luckiest use the test environment; they show the range that ties leave open."
    return _grid(f"{dataset}: how ties are broken", dataset, columns, (note, limits))


def evaluation_frequency(runs: Sequence[RunRecord], dataset: str, intervals: Sequence[int] = INTERVALS) -> Grid:
    """Make a table of training-domain averages with fewer evaluations. The oracle uses only the last one."""
    columns: list[_Column] = []
    for interval in intervals:
        fewer = [run.at(every(run, interval)) for run in runs]
        columns.append((f"every {interval}", _averages(fewer, dataset, by_rule("training-domain"))))
    return _grid(f"{dataset}: how often runs are evaluated", dataset, columns)


def other_rules(runs: Sequence[RunRecord], dataset: str) -> Grid:
    """Make a table of averages under the paper's two rules and under worst-training-domain."""
    rules = ("training-domain", "worst-training-domain", "oracle")
    columns = [(rule, _averages(runs, dataset, by_rule(rule))) for rule in rules]
    note = (
        "Worst-training-domain takes the checkpoint and the draw whose lowest validation accuracy over the training "
        "environments is highest, where training-domain takes the highest mean."
    )
    return _grid(f"{dataset}: which rule chooses", dataset, columns, (note,))


def tau_range(runs: Sequence[RunRecord], dataset: str) -> Grid:
    """Make a table of averages over the draws within ranges of tau. Methods without a tau are left out."""
    masked = [run for run in runs if "tau" in run.spec.hparams]
    if not masked:
        raise SandmaskError(f"No run on {dataset} has a hyperparameter tau among these records.")
    ranges = [(0.0, 1.0), (0.5, 1.0), *itertools.pairwise(THRESHOLDS)]
    columns: list[_Column] = []
    for low, high in ranges:
        within = [run for run in masked if low <= run.spec.hparams["tau"] <= high]
        columns.append((f"τ in [{low:g}, {high:g}]", _averages(within, dataset, by_rule("training-domain"))))
    note = (
        "DomainBed draws AND-mask's τ from [0.5, 1]; the paper's table says [0, 1] for both. Narrow ranges have fewer "
        "draws to choose from."
    )
    return _grid(f"{dataset}: the range of τ, training-domain", dataset, columns, (note,))


def rescaling(runs: Sequence[RunRecord], dataset: str) -> Grid:
    """Make a table of averages of the variants of the masks, under both rules."""
    names = {"ANDMask", "SANDMask", *PRINTED_AS}
    forms = [run for run in runs if run.spec.algorithm in names]
    columns = [(rule, _averages(forms, dataset, by_rule(rule))) for rule in ("training-domain", "oracle")]
    return _grid(f"{dataset}: rescale", dataset, columns)


def _averages(runs: Sequence[RunRecord], dataset: str, pick: Pick) -> dict[str, tuple[float, float | None] | None]:
    mine = [run for run in runs if run.spec.dataset == dataset]
    count = len(environments(dataset)) or (len(mine[0].env_names) if mine else 0)
    return averages(trial_choices(mine, pick), count)


def _grid(title: str, dataset: str, columns: Sequence[_Column], notes: Sequence[str] = ()) -> Grid:
    methods = list(dict.fromkeys(method for _, found in columns for method in found))
    rows = []
    for method in methods:
        paper = printed("training-domain", dataset, printed_row(method))
        words = [_words(found.get(method)) for _, found in columns]
        rows.append((method, *words, "-" if paper is None else f"{paper.mean_digits} ± {paper.error_digits}"))
    header = ("Algorithm", *(name for name, _ in columns), "paper, training-domain")
    return Grid(title, header, tuple(rows), tuple(notes))


def _words(value: tuple[float, float | None] | None) -> str:
    return "-" if value is None else cell_text(Cell(mean=value[0], error=value[1], have=1, expected=1))


Question = Callable[[Sequence[RunRecord], str], Grid]
QUESTIONS: dict[str, Question] = {
    "ties": tie_breaking,
    "frequency": evaluation_frequency,
    "rules": other_rules,
    "tau": tau_range,
    "rescale": rescaling,
}
SPIRALS_QUESTIONS: dict[str, Question] = {
    "spiral": spiral_found,
    "draws": spiral_draws,
    "signatures": signatures,
    "contrary": contrary,
}
