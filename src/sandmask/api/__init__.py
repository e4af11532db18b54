"""Everything that the command line does, as functions with plain arguments; results are pandas frames.

    run = sandmask.train("Spirals", "ANDMask", 0, steps=300)
    swept = sandmask.sweep("runs/spirals", "Spirals", ["ERM", "ANDMask"], test_envs=[0], n_hparams=4, n_trials=1)
    print(swept.report())
    sandmask.predict(run.folder, ["points.csv"])

These functions are names of `sandmask` itself and are loaded when they are first used. The command line calls them: a
call and a command with the same arguments give the same records, to the bit on a CPU. What a user can correct raises
`SandmaskError` with the message that the command prints.
"""

from sandmask.api._predict import predict
from sandmask.api._sweep import SweepRequest, plan_sweep, sweep
from sandmask.api._swept import Sweep
from sandmask.api._train import Run, train

__all__ = ["Run", "Sweep", "SweepRequest", "plan_sweep", "predict", "sweep", "train"]
