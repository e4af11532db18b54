"""Find modules and graphs in which environments influence each other, and freeze batch-norm."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.weak import WeakIdKeyDictionary

from sandmask.masks import MaskError
from sandmask.masks._errors import warn_once

Model = TypeVar("Model", bound=nn.Module)

_FREEZE = "call sandmask.freeze_batchnorm(model), or replace it by GroupNorm or LayerNorm"


@dataclass(frozen=True)
class Leak:
    """A module through which environments influence each other, with the reason and a fix."""

    name: str
    """The name of the module in the model; "" is the model itself."""
    module: str
    """The module's class."""
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.module}): {self.reason}. To fix it, {self.remedy}."


def find_leaks(model: nn.Module) -> list[Leak]:
    """List the modules of a model through which environments influence each other, in the order of its modules.

    A mask is meaningful only if each environment's gradient depends on its own examples.

    :param model: the model to inspect.
    :return: one `Leak` per module, with the reason and a fix; empty if there is none.

    >>> import sandmask
    >>> from torch import nn
    >>> for leak in sandmask.find_leaks(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))):
    ...     print(leak.name, leak.module)
    1 BatchNorm1d
    """
    found = []
    for name, module in model.named_modules():
        if (why := _reason(module)) is not None:
            found.append(Leak(name, type(module).__name__, *why))
    return found


def _reason(module: nn.Module) -> tuple[str, str] | None:
    """Why environments influence each other through a module, and how to fix it."""
    if type(module).__name__ == "FullyShardedDataParallel":
        return (
            "its parameters are sharded over processes, but masks need whole parameters",
            "give every process the whole model, with or without DistributedDataParallel",
        )
    if not isinstance(module, _NormBase):
        return None
    running = module.running_mean is not None
    if isinstance(module, _InstanceNorm):
        if running and module.training:
            return "its running statistics, used in evaluation, mix all environments", "set track_running_stats=False"
        return None
    if not running:
        return (
            "without running statistics, it mixes the examples of every batch, even in evaluation",
            "replace it by GroupNorm or LayerNorm",
        )
    if not module.training:
        return None
    if isinstance(module, nn.SyncBatchNorm):
        return "its statistics mix the batches of all processes, even of different environments", _FREEZE
    return "in training mode, it mixes the examples of a batch, and its running averages mix all environments", _FREEZE


def freeze_batchnorm(model: Model) -> Model:
    """Keep every batch-norm layer of the model in evaluation mode, also after `model.train()`.

    The layers then use their current statistics, usually the statistics of pretrained weights, so environments do not
    influence each other. The weights and biases of the layers are still trained. Copies of the model stay frozen, and
    so does a model that `torch.save` writes.

    :param model: the model, which is changed in place.
    :return: the model.
    """
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        if module.running_mean is None:
            raise MaskError(
                f"Batch-norm layer `{name}` should have running statistics to be frozen. Found none "
                "(track_running_stats=False). Replace it by GroupNorm or LayerNorm."
            )
        module.eval()
        # An attribute of the instance takes precedence over the method of the class, so model.train() calls it.
        module.train = partial(_stay_frozen, module)  # type: ignore[method-assign, assignment]
    return model


def _stay_frozen(module: nn.Module, mode: bool = True) -> nn.Module:  # noqa: ARG001
    """Replaces `module.train`."""
    return module


REENTRANT = (
    "A loss went through `torch.utils.checkpoint` with use_reentrant=True, which hides its parameters: they would get "
    "no gradient. Pass use_reentrant=False (in Hugging Face models, "
    '`gradient_checkpointing_enable({"use_reentrant": False})`).'
)
_checked = WeakIdKeyDictionary()


def check_graph(loss: Tensor, model_key: Tensor) -> None:
    """Warn once per process about batch-norm in training mode. Raise an error for a checkpoint that hides parameters.

    Only the graph of the first loss of each model is checked, so that training does not slow down.

    :param loss: the loss.
    :param model_key: the model's first parameter, which identifies the model.
    """
    if model_key in _checked:
        return
    leaks = False
    for node in nodes(loss):
        if node.name() == "CheckpointFunctionBackward":
            raise MaskError(REENTRANT)
        leaks = leaks or ("BatchNorm" in node.name() and _mixes(node))
    _checked[model_key] = True
    if leaks:
        warn_once(
            "training-batchnorm",
            "A loss went through batch-norm in training mode. Its statistics mix the examples of a batch "
            "(and the environments, if they share a forward pass), and its running averages mix all "
            "environments. Call `sandmask.freeze_batchnorm(model)`; "
            "`sandmask.find_leaks(model)` lists the layers.",
            stacklevel=9,  # the caller of `backward`
        )


def nodes(*losses: Tensor, most: int = 20_000) -> Iterator[Node]:
    """Yield the nodes of the graph of losses, `most` of them at most."""
    seen: set[Node] = set()
    stack = [loss.grad_fn for loss in losses]
    while stack and len(seen) < most:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(parent for parent, _ in node.next_functions)


def _mixes(node: Node) -> bool:
    """Whether a node is batch-norm in training mode, which mixes examples.

    Native, cuDNN and MIOpen nodes save their mode. The node of synchronized batch-norm exists only in training mode.
    """
    if not getattr(node, "_saved_training", True):
        return False
    # Instance norm is batch-norm over [1, N * C, ...]: examples stay apart.
    inputs = getattr(node, "_saved_input", None)
    return not (isinstance(inputs, torch.Tensor) and inputs.shape[0] == 1)
