"""Training: from the spec of a run to its records and its model.

One run:

    from sandmask.datasets import DATASETS, load_dataset
    from sandmask.training import RunFolder, make_spec

    spec = make_spec(DATASETS["Spirals"], "SANDMask", test_envs=[0], hparams={"tau": 0.95})
    record = RunFolder(Path("runs/first")).train(spec, load_dataset("Spirals"), torch.device("cpu"))
"""

from sandmask.training.averaging import parse_averages
from sandmask.training.checkpoint import MODELS_SUFFIX, split_checkpoint
from sandmask.training.evaluation import Accuracies
from sandmask.training.exporting import Exported, export_run
from sandmask.training.folder import RunFolder
from sandmask.training.keeping import KEPT, WEIGHTS, KeptModel, StackModels, kept_models
from sandmask.training.loop import Progress, Trainer, train_stack
from sandmask.training.precision import PRECISIONS, choose_device, set_precision
from sandmask.training.sampling import split_environment
from sandmask.training.specs import make_spec, stack_key
from sandmask.training.stack import Stack
from sandmask.training.trained_run import TrainedRun, load_run

__all__ = [
    "KEPT",
    "MODELS_SUFFIX",
    "PRECISIONS",
    "WEIGHTS",
    "Accuracies",
    "Exported",
    "KeptModel",
    "Progress",
    "RunFolder",
    "Stack",
    "StackModels",
    "TrainedRun",
    "Trainer",
    "choose_device",
    "export_run",
    "kept_models",
    "load_run",
    "make_spec",
    "parse_averages",
    "set_precision",
    "split_checkpoint",
    "split_environment",
    "stack_key",
    "train_stack",
]
