"""Model selection: choose the runs and checkpoints of a sweep that tables report.

Rules are pure functions of records, in a registry:

    from sandmask.selection import RULES, group_runs, select
    for key, runs in group_runs(read_runs("runs")).items():
        chosen = select(RULES["training-domain"], runs, key.test_env)
        print(key, chosen and chosen.test_accuracy)

Your own rule is a function of one run: see `selection_rule`.
"""

from sandmask.selection._groups import (
    GroupKey,
    candidates,
    changed_by_hand,
    group_runs,
    is_settled,
    rivals,
    select,
    siblings,
)
from sandmask.selection._method_names import (
    ADAPTATIONS,
    SEARCH,
    adaptation_of,
    algorithm_of,
    is_searched,
    is_soup,
    method_names,
    settings_of,
    spoken_soup,
)
from sandmask.selection._rules import (
    ACCURACY,
    RULES,
    Choice,
    Selected,
    SelectionRule,
    by_metric,
    common_signal,
    find_rule,
    has_common_signal,
    leave_one_domain_out,
    mean_over_environments,
    oracle,
    selection_rule,
    signal_threshold,
    training_domain,
    worst_training_domain,
)

__all__ = [
    "ACCURACY",
    "ADAPTATIONS",
    "RULES",
    "SEARCH",
    "Choice",
    "GroupKey",
    "Selected",
    "SelectionRule",
    "adaptation_of",
    "algorithm_of",
    "by_metric",
    "candidates",
    "changed_by_hand",
    "common_signal",
    "find_rule",
    "group_runs",
    "has_common_signal",
    "is_searched",
    "is_settled",
    "is_soup",
    "leave_one_domain_out",
    "mean_over_environments",
    "method_names",
    "oracle",
    "rivals",
    "select",
    "selection_rule",
    "settings_of",
    "siblings",
    "signal_threshold",
    "spoken_soup",
    "training_domain",
    "worst_training_domain",
]
