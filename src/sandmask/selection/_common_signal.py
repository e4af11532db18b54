"""Common signal: stop where the training environments' gradients have nothing in common any more. A rule of ours."""

import numpy as np
from numpy.typing import NDArray

from sandmask.records import RunRecord
from sandmask.selection._base import Choice, selection_rule

COHERENCE, LOSS = "held_out_coherence", "held_out_loss"


def signal_threshold(environments: int) -> float:
    """The coherence |mean_e g_e|^2 / mean_e |g_e|^2 at which the mean gradient is as much signal as noise.

    Let g_e = s + n_e, with a part s that all E environments share and independent parts n_e of power v. The mean
    gradient then has a signal of power |s|^2 and a noise of power v / E, and the coherence is
    (|s|^2 + v / E) / (|s|^2 + v): 1/E where nothing is shared, and 2 / (E + 1) where |s|^2 = v / E.
    """
    return 2 / (environments + 1)


def has_common_signal(run: RunRecord) -> NDArray[np.bool_]:
    """At which checkpoints [T] the mean gradient on held-out examples is more signal than noise.

    A single evaluation is noisy: what counts is the median of a checkpoint's coherence and its two neighbours'. The
    first and the last have one neighbour, and are judged by their own value alone.
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
    """The most likely checkpoint of those at which the training environments still pull the same way.

    A model may fit the training environments, held-out examples included, by what is particular to each of them.
    Accuracy there cannot tell; the gradients can: once a model lives on particulars, they share nothing. So only
    checkpoints with a common signal (`has_common_signal`) are candidates. Among them, and between runs, the value is
    exp(-loss): the geometric mean of the probabilities that the model gives to the right labels of the training
    environments' "out" examples; of ties, the first. (Accuracy would rank models whose loss has exploded too high.)

    A run that was trained without --diagnostics, and one without any such checkpoint, is not judged. It uses no test
    data.
    """
    likelihood = np.exp(-run.metrics[LOSS])
    candidates = has_common_signal(run) & np.isfinite(likelihood)
    if not candidates.any():
        return None
    index = int(np.where(candidates, likelihood, -1.0).argmax())
    return Choice(index, (float(likelihood[index]),))
