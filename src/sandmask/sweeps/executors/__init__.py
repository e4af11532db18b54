"""Executors: each is a `concurrent.futures.Executor`, built from the same options.

from sandmask.sweeps.executors import EXECUTORS, ExecutorOptions

with EXECUTORS["local"].build(ExecutorOptions(workers=2)) as executor:
    print(executor.submit(pow, 2, 5).result())
"""

# The order of these imports is the order in which executors are listed.
# isort: off
from sandmask.sweeps.executors._base import EXECUTORS, ExecutorEntry, ExecutorOptions
from sandmask.sweeps.executors._local import InlineExecutor, WorkerExecutor
from sandmask.sweeps.executors._mps import shared_gpus, workers_share
from sandmask.sweeps.executors._ray import RayExecutor
from sandmask.sweeps.executors._slurm import SlurmExecutor

__all__ = [
    "EXECUTORS",
    "ExecutorEntry",
    "ExecutorOptions",
    "InlineExecutor",
    "RayExecutor",
    "SlurmExecutor",
    "WorkerExecutor",
    "shared_gpus",
    "workers_share",
]
