"""Training methods, one file each, as pure functions of a state; `ALGORITHMS` lists them.

An algorithm is built for a `Problem` and is then three pure functions:

    algorithm = ALGORITHMS["SANDMask"].build(problem)
    state = algorithm.init(seed)
    state, metrics = algorithm.step(state, batch, hparams, key)
    logits = algorithm.predict(state, x)
"""

from sandmask.algorithms._base import (
    ALGORITHMS,
    Algorithm,
    AlgorithmEntry,
    Hparams,
    Metrics,
    ObjectiveAlgorithm,
    Problem,
    State,
    cross_entropy,
    descend,
    environment_risks,
)
from sandmask.algorithms.and_mask import ANDMaskAlgorithm
from sandmask.algorithms.erm import ERM
from sandmask.algorithms.sand_mask import SANDMaskAlgorithm

__all__ = [
    "ALGORITHMS",
    "ERM",
    "ANDMaskAlgorithm",
    "Algorithm",
    "AlgorithmEntry",
    "Hparams",
    "Metrics",
    "ObjectiveAlgorithm",
    "Problem",
    "SANDMaskAlgorithm",
    "State",
    "cross_entropy",
    "descend",
    "environment_risks",
]
