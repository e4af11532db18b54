"""Metrics beyond accuracy of K runs, computed from counts of predictions.

Counts are integers, whose sum does not depend on the order. The metrics of a run therefore do not depend on its stack,
on the batches of an evaluation, or on the order of operations on a GPU.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sandmask._devices import widest_float
from sandmask.functional.ranks import Ranks

BINS = 15  # bins of confidence (Guo et al., 2017)
_UNIT = 2**32  # confidences are counted as integer multiples of 1 / _UNIT

Counts = Mapping[str, Tensor]  # [K, G, ...] each, by name


def _wide(values: Tensor) -> Tensor:
    return values.to(widest_float(values.device))


def f1(counts: Counts) -> Tensor:
    """2 TP / (true + predicted), averaged over the classes that occur or were predicted."""
    either = counts["true"] + counts["predicted"]
    scores = 2 * _wide(counts["right"]) / either.clamp(min=1)
    return scores.sum(-1) / (either > 0).sum(-1).clamp(min=1)


def worst_group(counts: Counts) -> Tensor:
    """The lowest accuracy of all classes that have examples."""
    accuracy = _wide(counts["right"]) / counts["true"].clamp(min=1)
    return torch.where(counts["true"] > 0, accuracy, 1.0).amin(-1)


def ece(counts: Counts) -> Tensor:
    """The mean difference between confidence and accuracy over bins, weighted by the share of examples in each bin."""
    examples = counts["true"].sum(-1).clamp(min=1)
    return _wide(counts["surplus"]).abs().sum(-1) / _UNIT / examples


def per_class(counts: Counts) -> Tensor:
    """The numbers of correct predictions and of examples of each class, [K, G, C, 2]."""
    return torch.stack([counts["right"], counts["true"]], -1)


# The function of each metric of `records.MEASURES`, and the counts that it needs.
_COMPUTED: dict[str, tuple[Callable[[Counts], Tensor], tuple[str, ...]]] = {
    "f1": (f1, ("right", "true", "predicted")),
    "ece": (ece, ("surplus", "true")),
    "worst-group": (worst_group, ("right", "true")),
    "per-class": (per_class, ("right", "true")),
    "confusion": (lambda counts: counts["confusion"], ("confusion",)),  # true and predicted class: [K, G, C * C]
}


class Counter:
    """Counts predictions for the metrics `names` over G groups of examples.

    Group 2e is the "in" split of environment e, and group 2e + 1 the "out" split. Batches are added one after the
    other. Counting never waits for the device.
    """

    def __init__(
        self,
        names: Sequence[str],
        n_runs: int,
        n_groups: int,
        n_classes: int,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self.names, self.n_classes, self.ranks = names, n_classes, ranks
        needed = {count for name in names for count in _COMPUTED[name][1]}
        widths = {"surplus": BINS, "confusion": n_classes**2}
        self._counts = {
            count: torch.zeros(n_runs, n_groups, widths.get(count, n_classes), dtype=torch.int64, device=device)
            for count in sorted(needed)
        }

    def add(self, logits: Tensor, labels: Tensor, groups: Tensor, runs: Tensor | slice) -> None:
        """Count a batch of some runs: logits [K, n, C], labels [n] or [K, n], and groups of the examples [K, n]."""
        labels, answers = labels.expand(groups.shape), logits.argmax(-1)
        right = (answers == labels).long()
        one = torch.ones_like(right)
        for name, counts in self._counts.items():
            if name == "surplus":
                # The confidence of a diverged run is NaN, but its record ends before this evaluation.
                confidence = _wide(logits.float().softmax(-1).amax(-1)).nan_to_num(1.0)
                places = (confidence * BINS).ceil().clamp(1, BINS).long() - 1
                amount = (confidence * _UNIT).round().long() - right * _UNIT
            elif name == "confusion":
                places, amount = labels * self.n_classes + answers, one
            else:
                places, amount = (answers if name == "predicted" else labels), (right if name == "right" else one)
            flat = counts.flatten(1)  # a view
            flat[runs] = flat[runs].scatter_add(1, groups * counts.shape[2] + places, amount)

    def values(self) -> dict[str, Tensor]:
        """Return each metric as [K, numbers], with all "in" splits before all "out" splits.

        Counts are summed over processes, so call this only once.
        """
        counts = {name: self.ranks.sum(count) for name, count in self._counts.items()}
        values = {name: _COMPUTED[name][0](counts) for name in self.names}  # [K, G, ...]
        return {name: _wide(torch.cat([of[:, 0::2], of[:, 1::2]], 1).flatten(1)) for name, of in values.items()}
