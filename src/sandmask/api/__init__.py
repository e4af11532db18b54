"""A function for each command, with plain arguments and pandas frames as results.

    run = sandmask.train("Spirals", "ANDMask", 0, steps=300)
    swept = sandmask.sweep("runs/spirals", "Spirals", ["ERM", "ANDMask"], test_envs=[0], n_hparams=4, n_trials=1)
    print(swept.report())
    sandmask.predict(run.folder, ["points.csv"])

These functions are available from `sandmask` and are loaded when they are first used. The command line calls them: a
call and a command with the same arguments give the same records, to the bit on a CPU. User errors raise `SandmaskError`
with the message that the command prints.
"""

from sandmask.api._predict import predict
from sandmask.api._soup import soup
from sandmask.api._sweep import plan_sweep, sweep
from sandmask.api._sweep_arguments import SweepRequest
from sandmask.api._swept import Sweep
from sandmask.api._train import Run, train

__all__ = ["Run", "Sweep", "SweepRequest", "plan_sweep", "predict", "soup", "sweep", "train"]
