"""See in a loss's graph what breaks a mask: `backward` is not given the model."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

from sandmask.masks import MaskError
from sandmask.masks._errors import warn_once

_MOST_NODES = 20_000
_checked = WeakIdKeyDictionary()


def check_graph(loss: Tensor, model_key: Tensor) -> None:
    """Warn, once per process, of batch-norm in training mode; raise for a checkpoint that hides its parameters.

    The graph is walked for the first loss of each model only (told apart by `model_key`, its first
    parameter), so that a training loop pays nothing.
    """
    if model_key in _checked:
        return
    leaks = False
    for node in nodes(loss):
        if node.name() == "CheckpointFunctionBackward":
            raise MaskError(
                "A loss went through `torch.utils.checkpoint` with use_reentrant=True, which hides the parameters "
                "inside: they would get no gradient. Pass use_reentrant=False (in Hugging Face models, "
                '`gradient_checkpointing_enable({"use_reentrant": False})`).'
            )
        leaks = leaks or ("BatchNorm" in node.name() and _mixes(node))
    _checked[model_key] = True
    if leaks:
        warn_once(
            "training-batchnorm",
            "A loss went through batch-norm in training mode: its statistics tie the examples of a batch "
            "together (and, where environments share a forward pass, the environments), and its running "
            "averages mix all environments. Call `sandmask.freeze_batchnorm(model)`; "
            "`sandmask.find_leaks(model)` lists the layers.",
            stacklevel=9,  # the caller of `backward`
        )


def nodes(loss: Tensor) -> Iterator[Node]:
    """The graph of `loss`, or its first 20,000 nodes."""
    seen: set[Node] = set()
    stack = [loss.grad_fn]
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(parent for parent, _ in node.next_functions)


def _mixes(node: Node) -> bool:
    """Native, cuDNN and MIOpen nodes save their mode; synchronized batch-norm's exists in training only."""
    if not getattr(node, "_saved_training", True):
        return False
    # Instance norm is batch-norm over [1, N * C, ...]: examples stay apart.
    inputs = getattr(node, "_saved_input", None)
    return not (isinstance(inputs, torch.Tensor) and inputs.shape[0] == 1)
