"""Gradient masks for models that must work on domains they have not seen.

Data from several domains ("environments") contains features that predict the label in all of them, and
shortcuts that predict it in some and mislead in others. A mask compares the gradients of the environments and
keeps what they agree on. In a training loop, `loss.backward()` becomes

    losses = [loss_fn(model(x), y) for x, y in batches]      # one batch per environment
    sandmask.backward(losses, model.parameters(), sandmask.SANDMask(tau=0.8))
    optimizer.step()

>>> import torch, sandmask
>>> model = torch.nn.Linear(2, 1, bias=False)
>>> first, second = model(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))  # environments disagree on feature 2
>>> report = sandmask.backward([-first, -second], model.parameters(), sandmask.ANDMask(tau=1.0))
>>> model.weight.grad
tensor([[-1.,  0.]])
>>> report.dead_fraction
0.5

- `ANDMask`, `SANDMask`, `GeometricMean`, `AgrSum`, `AgrRand`: the masks. Called on gradients `[E, *shape]`,
  each returns the masked mean gradient. `GradientMoments` accumulates gradients one by one for them.
- `backward`: fills `.grad` from one loss per environment and returns a `MaskReport`. Works with a generator of
  losses, mixed precision and gradient accumulation.
- `environment_gradients`, `environment_moments`, `set_gradients`: the same from a model and one batch per environment.
- `record`: one forward pass over all environments, and one backward pass for all of their losses.
- `find_leaks`, `freeze_batchnorm`: prevent environments from influencing each other.
- `sandmask.distributed`: environments in several processes.
- `sandmask.diagnostics`: logs what the mask does, to TensorBoard or a CSV file.

The benchmark, as on the command line:

- `train`, `sweep`, `plan_sweep`: train one run, train many, estimate the cost.
- `report`, `load_records`: tables, and every evaluation as a pandas frame.
- `predict`, `load_run`: use a trained model.
- `soup`: combine the models of a sweep.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sandmask._version import __version__
from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from sandmask import diagnostics, distributed
    from sandmask.api import plan_sweep, predict, soup, sweep, train
    from sandmask.gradients import (
        Leak,
        MaskReport,
        MaskSummary,
        backward,
        environment_gradients,
        environment_moments,
        find_leaks,
        freeze_batchnorm,
        record,
        set_gradients,
    )
    from sandmask.masks import (
        AgrRand,
        AgrSum,
        ANDMask,
        GeometricMean,
        GradientMoments,
        Mask,
        MaskError,
        MaskWarning,
        SANDMask,
    )
    from sandmask.records import load_records
    from sandmask.reports import report
    from sandmask.training import load_run

__all__ = [
    "ANDMask",
    "AgrRand",
    "AgrSum",
    "GeometricMean",
    "GradientMoments",
    "Leak",
    "Mask",
    "MaskError",
    "MaskReport",
    "MaskSummary",
    "MaskWarning",
    "SANDMask",
    "SandmaskError",
    "__version__",
    "backward",
    "diagnostics",
    "distributed",
    "environment_gradients",
    "environment_moments",
    "find_leaks",
    "freeze_batchnorm",
    "load_records",
    "load_run",
    "plan_sweep",
    "predict",
    "record",
    "report",
    "set_gradients",
    "soup",
    "sweep",
    "train",
]

# Names and modules are imported at first use: `sandmask --help` answers without torch, and the masks load torch alone.
_HOMES = {
    "sandmask": ["diagnostics", "distributed"],
    "sandmask.api": ["plan_sweep", "predict", "soup", "sweep", "train"],
    "sandmask.gradients": [
        *("Leak", "MaskReport", "MaskSummary", "backward", "environment_gradients", "environment_moments"),
        *("find_leaks", "freeze_batchnorm", "record", "set_gradients"),
    ],
    "sandmask.masks": [
        *("ANDMask", "AgrRand", "AgrSum", "GeometricMean", "GradientMoments", "Mask", "MaskError", "MaskWarning"),
        "SANDMask",
    ],
    "sandmask.records": ["load_records"],
    "sandmask.reports": ["report"],
    "sandmask.training": ["load_run"],
}
_LAZY = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _LAZY.get(name, __name__)
    if home != __name__:
        return getattr(import_module(home), name)
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
