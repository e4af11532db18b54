"""Sweeps: thousands of runs from one description, trained as stacks by local, Ray or Slurm workers.

`sandmask.sweep` does all of it in one call. Its parts:

    from sandmask.sweeps import JobOptions, SweepFolder, SweepSpec, expand, run_sweep
    from sandmask.sweeps.executors import InlineExecutor

    sweep = SweepSpec(datasets=("Spirals",), algorithms=("ERM", "SANDMask"), n_hparams=4, n_trials=1)
    folder = SweepFolder(Path("runs/spirals"))
    folder.accept(sweep)
    run_sweep(folder, expand(sweep), JobOptions(str(folder.path)), InlineExecutor, cap=lambda specs: 64)
"""

from sandmask.sweeps._expand import Expansion, expand, normalized, run_seed
from sandmask.sweeps._folder import SweepFolder
from sandmask.sweeps._job import Job, JobOptions, Outcome, run_job
from sandmask.sweeps._plan import Estimator, Plan, StackEstimate, make_plan
from sandmask.sweeps._progress import StackStatus
from sandmask.sweeps._run import SweepResult, run_sweep
from sandmask.sweeps._search import Search, open_search
from sandmask.sweeps._soup import ENSEMBLE, SOUPS, Candidates, Soup, candidates, make_soup, parse_soups, why_not
from sandmask.sweeps._spec import SweepSpec, read_sweep, refused_changes, to_toml, write_sweep
from sandmask.sweeps._stacks import PlannedStack, group
from sandmask.sweeps._status import Standing, SweepStatus, sweep_status

__all__ = [
    "ENSEMBLE",
    "SOUPS",
    "Candidates",
    "Estimator",
    "Expansion",
    "Job",
    "JobOptions",
    "Outcome",
    "Plan",
    "PlannedStack",
    "Search",
    "Soup",
    "StackEstimate",
    "StackStatus",
    "Standing",
    "SweepFolder",
    "SweepResult",
    "SweepSpec",
    "SweepStatus",
    "candidates",
    "expand",
    "group",
    "make_plan",
    "make_soup",
    "normalized",
    "open_search",
    "parse_soups",
    "read_sweep",
    "refused_changes",
    "run_job",
    "run_seed",
    "run_sweep",
    "sweep_status",
    "to_toml",
    "why_not",
    "write_sweep",
]
