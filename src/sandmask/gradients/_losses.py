"""Gradients of one environment after the other, from a list of losses or a generator."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask.gradients._validator import REENTRANT
from sandmask.masks import MaskError

EnvironmentLoss = Tensor | Iterable[Tensor]
Losses = Tensor | Iterable[EnvironmentLoss]
EnvironmentGradients = list[Tensor | None]

# Loss functions that are a mean over examples. Held here, so that one that replaces them in torch is not among them.
_MEANS = (F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits)


def gradients_by_environment(
    losses: Losses,
    params: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    prepare: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Iterator[EnvironmentGradients]:
    """Yield every environment's gradients, `None` where a parameter is unused.

    Losses in a list, a tensor or any other collection may share a graph, which is kept until the last one. Those of a
    generator are taken one at a time, and the graph of each is freed before the next is computed.

    :param prepare: applied to each loss before it is differentiated.
    """
    losses = _one_by_one(losses)
    last = len(losses) - 1 if isinstance(losses, Collection) else None
    for environment, of_environment in enumerate(losses):
        retain = retain_graph or (last is not None and environment < last)
        total: EnvironmentGradients | None = None
        owned: set[int] = set()  # the sums that were made here
        for loss, keep in _micro_batches(of_environment, environment, retain=retain):
            gradients = _differentiate(prepare(loss), params, retain_graph=keep)
            total = list(gradients) if total is None else _add(total, gradients, owned)
            # Else a name here would keep this loss alive while the next one is computed.
            del loss, gradients
        if total is None:
            raise MaskError(f"Environment {environment} should have at least one loss. Found an empty iterable.")
        del of_environment
        yield total


def _one_by_one(losses: Losses) -> Iterable[EnvironmentLoss]:
    if isinstance(losses, Tensor):
        if losses.ndim == 1:
            return losses.unbind()
        found = f"a tensor of shape {tuple(losses.shape)}"
    elif isinstance(losses, Mapping):
        found = "a dict: pass its `.values()`"
    elif isinstance(losses, Iterable):
        return losses
    else:
        found = type(losses).__name__
    raise MaskError(
        "Parameter `losses` should be a tensor [E] of one loss per environment, or an iterable of losses. "
        f"Found {found}."
    )


def _differentiate(loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`, with errors about graphs that name the parameters of `backward`."""
    try:
        return torch.autograd.grad(loss, params, retain_graph=retain_graph, allow_unused=True)
    except RuntimeError as error:
        if (explanation := explained(error)) is None:
            raise
        raise explanation from error


def explained(error: RuntimeError) -> MaskError | None:
    """An error of a backward pass with the parameters of `backward` and what to do, if it is a known one."""
    message = str(error)
    if "a second time" in message:
        return MaskError(
            "A loss's graph was freed by an earlier backward pass. Losses that share a graph should be in a list, "
            "not a generator. For a second backward pass through one graph, pass `retain_graph=True` to the first."
        )
    if "donated buffer" in message:
        return MaskError(
            "The graph of a compiled model or loss cannot be kept, as a list of losses and the first recording of a "
            "model require. Pass a generator of losses to `sandmask.backward`, or set "
            "`torch._functorch.config.donated_buffer = False` before compiling."
        )
    if "fabric.backward" in message:
        return MaskError(
            "With mixed precision, outputs of a model that Lightning Fabric set up accept only `fabric.backward`. Call "
            "`model.module(x)` inside of `with fabric.autocast():`."
        )
    return MaskError(REENTRANT) if "use_reentrant=True" in message else None


def _micro_batches(losses: EnvironmentLoss, environment: int, *, retain: bool) -> Iterator[tuple[Tensor, bool]]:
    """The losses of one environment, each with whether its graph is still needed afterwards."""
    if isinstance(losses, Tensor) or not isinstance(losses, Iterable):
        yield scalar_loss(losses, environment), retain
        return
    last = len(losses) - 1 if isinstance(losses, Collection) else None
    for part, loss in enumerate(losses):
        yield scalar_loss(loss, environment), retain or (last is not None and part < last)


def scalar_loss(loss: object, environment: int) -> Tensor:
    """The loss without dimensions, if it is one that a gradient can be taken of."""
    where = f"The loss of environment {environment}"
    if not isinstance(loss, Tensor):
        raise MaskError(f"{where} should be a tensor. Found {type(loss).__name__}.")
    if loss.numel() != 1:
        raise MaskError(f"{where} should be a scalar. Found shape {tuple(loss.shape)}. Take its mean first.")
    if not loss.requires_grad:
        raise MaskError(
            f"{where} should depend on a parameter. Found a tensor that requires no gradient. "
            "Was it detached, or computed under `torch.no_grad`?"
        )
    return loss if loss.ndim == 0 else loss.reshape(())


def joined_targets(loss_fn: object, output: Tensor, targets: Sequence[Tensor]) -> Tensor | None:
    """The targets of all environments, if the loss of all examples is known to be the mean of the environments' losses.

    It is for functions that are a mean over examples, if all environments have equally many. `cross_entropy` excludes
    examples whose target is `ignore_index`, which is negative. On a GPU, looking for one would wait for the device, so
    losses are joined on a CPU only.

    :param output: the model's output for the examples of all environments.
    :param targets: the targets of each environment.
    """
    if not any(loss_fn is mean for mean in _MEANS) or len({y.shape for y in targets}) > 1 or not output.is_cpu:
        return None
    y = torch.cat(list(targets))
    if loss_fn is F.cross_entropy and y.dtype == torch.int64:
        return y if output.ndim == y.ndim + 1 and int(y.min()) >= 0 else None
    return y if y.shape == output.shape and y.dtype == output.dtype else None


def _add(total: EnvironmentGradients, gradients: Sequence[Tensor | None], owned: set[int]) -> EnvironmentGradients:
    """The sum of gradients, in place only for sums that were made here, whose places are in `owned`.

    Gradients from autograd may share memory: two parameters that are added have the same gradient tensor.
    """
    summed: EnvironmentGradients = []
    for place, (sum_so_far, gradient) in enumerate(zip(total, gradients, strict=True)):
        if sum_so_far is None or gradient is None:
            summed.append(gradient if sum_so_far is None else sum_so_far)
        elif place in owned:
            summed.append(sum_so_far.add_(gradient))
        else:
            summed.append(sum_so_far + gradient)
            owned.add(place)
    return summed
