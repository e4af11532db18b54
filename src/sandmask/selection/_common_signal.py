"""Common signal: stop where the training environments' gradients have nothing in common any more. A rule of ours."""

import numpy as np
from numpy.typing import NDArray

from sandmask.records import RunRecord
from sandmask.selection._base import Choice, selection_rule

COHERENCE, LOSS = "held_out_coherence", "held_out_loss"


def signal_threshold(environments: int) -> float:
    """Return the coherence |mean_e g_e|^2 / mean_e |g_e|^2 at which signal and noise are equally large.

    Let g_e = s + n_e, with a part s that all E environments share and independent parts n_e of power v. The mean
    gradient has a signal of power |s|^2 and a noise of power v / E, and the coherence is (|s|^2 + v / E) / (|s|^2 +
    v): 1/E if nothing is shared, and 2 / (E + 1) if |s|^2 = v / E.

    :param environments: number of environments E.
    """
    return 2 / (environments + 1)


def has_common_signal(run: RunRecord) -> NDArray[np.bool_]:
    """Return at which checkpoints the mean gradient on held-out examples is more signal than noise.

    A checkpoint is judged by the median of its coherence and its two neighbours'. The first and the last are judged by
    their own value.

    :param run: record of a run with diagnostics.
    :return: booleans `[T]`.
    """
    padded = np.pad(run.metrics[COHERENCE], 1, mode="edge")
    median = np.median([padded[:-2], padded[1:-1], padded[2:]], axis=0)
    above: NDArray[np.bool_] = median >= signal_threshold(len(run.train_envs))
    return above


@selection_rule(
    "common-signal",
    "highest held-out likelihood while the training environments' gradients have a common signal (ours)",
    needs_metrics=(COHERENCE, LOSS),
)
def common_signal(run: RunRecord) -> Choice | None:
    """Select the most likely checkpoint at which the training environments' gradients have a common signal.

    Only checkpoints with a common signal (`has_common_signal`) are candidates. Among them, and between runs, the value
    is exp(-loss): the geometric mean of the probabilities that the model gives to the right labels of the training
    environments' "out" examples. The first of ties is selected. A run that was trained without --diagnostics, or
    without any such checkpoint, is not judged. The rule uses no test data.

    :param run: record of a run.
    """
    likelihood = np.exp(-run.metrics[LOSS])
    candidates = has_common_signal(run) & np.isfinite(likelihood)
    if not candidates.any():
        return None
    index = int(np.where(candidates, likelihood, -1.0).argmax())
    return Choice(index, (float(likelihood[index]),))
