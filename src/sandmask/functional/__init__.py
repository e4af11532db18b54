"""Pure functions for algorithms: random keys, batches, flat modules, Adam and gradients."""

from sandmask.functional.adam import AdamState, adam_init, adam_reset, adam_step
from sandmask.functional.batch import EnvBatch, make_batch
from sandmask.functional.dense import Dropout
from sandmask.functional.differentiate import AcrossRuns, Autograd, Differentiator, Direct, Functional
from sandmask.functional.flat import FlatModule, Params

__all__ = [
    "AcrossRuns",
    "AdamState",
    "Autograd",
    "Differentiator",
    "Direct",
    "Dropout",
    "EnvBatch",
    "FlatModule",
    "Functional",
    "Params",
    "adam_init",
    "adam_reset",
    "adam_step",
    "make_batch",
]
