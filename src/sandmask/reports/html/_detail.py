"""How much of each run's curves a page carries: everything, or what matters where everything would be too large."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sandmask.records import RunRecord

LAYER_METRIC = re.compile(r"(mask_density|dead_fraction|agreement)/(?!all(/|$)).")
LARGEST = 5_000_000  # values; some 5 MB of page


@dataclass(frozen=True)
class Detail:
    """What is kept of a run.

    `levels` is how finely accuracies are divided (1000 is to a tenth of a percent), and metrics between their least
    and greatest value.
    """

    every_environment: bool
    every_layer: bool
    points: int
    levels: int


FULL = Detail(every_environment=True, every_layer=True, points=101, levels=10_000)
SUMMARY = Detail(every_environment=False, every_layer=False, points=61, levels=1_000)


def choose_detail(runs: Sequence[RunRecord], largest: int = LARGEST) -> Detail:
    """All curves, unless they would make the page too large to send around."""
    values = sum(min(len(run.steps), FULL.points) * (2 * len(run.env_names) + len(run.metrics)) for run in runs)
    return FULL if values <= largest else SUMMARY


def kept_metrics(run: RunRecord, detail: Detail) -> list[str]:
    """The names of the metrics to keep."""
    return [name for name in run.metrics if detail.every_layer or not LAYER_METRIC.match(name)]
