"""What every run offers under every rule: the checkpoints that tables, curves and scatter plots have in common."""

from collections.abc import Mapping, Sequence

from sandmask.records import RunRecord
from sandmask.selection import RULES, Selected, candidates, group_runs

Offers = Mapping[str, Mapping[int, Selected]]  # by rule and by the run's place in the list


def all_offers(runs: Sequence[RunRecord], rules: Sequence[str]) -> Offers:
    """The checkpoint that each rule would take of each run, for the runs that it can judge."""
    place = {id(run): number for number, run in enumerate(runs)}
    groups = group_runs(runs)
    return {
        name: {
            place[id(offer.run)]: offer
            for key, group in groups.items()
            for offer in candidates(RULES[name], group, key.test_env)
        }
        for name in rules
    }
