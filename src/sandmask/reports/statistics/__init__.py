"""What a reviewer asks for: standard errors, intervals, paired comparisons, ranks. Seeded throughout."""

from sandmask.reports.statistics._bootstrap import bootstrap_interval, fewest_values
from sandmask.reports.statistics._error import mean_and_error
from sandmask.reports.statistics._paired import PairedComparison, paired_comparison
from sandmask.reports.statistics._ranks import critical_difference, mean_ranks, studentized_range

__all__ = [
    "PairedComparison",
    "bootstrap_interval",
    "critical_difference",
    "fewest_values",
    "mean_and_error",
    "mean_ranks",
    "paired_comparison",
    "studentized_range",
]
