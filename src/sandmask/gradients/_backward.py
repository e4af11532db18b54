"""`sandmask.backward`: replaces `loss.backward()`, for one loss per environment and a mask."""

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from sandmask.gradients._checks import Params, check_whole, checked_parameters
from sandmask.gradients._losses import EnvironmentGradients, Losses, gradients_by_environment
from sandmask.gradients._processes import Processes, moments_of_processes, resolve_processes
from sandmask.gradients._report import MaskReport
from sandmask.gradients._scaling import Scaling
from sandmask.gradients._validator import check_graph
from sandmask.masks import GradientMoments, Mask, MaskError
from sandmask.masks._base import check_count
from sandmask.masks._errors import warn_once
from sandmask.masks._finite import FiniteCheck, loss_not_finite


def backward(
    losses: Losses,
    params: Params,
    mask: Mask,
    *,
    processes: Processes | None = None,
    group: dist.ProcessGroup | None = None,
    scaler: GradScaler | None = None,
    retain_graph: bool = False,
    check_finite: bool = True,
    on_report: Callable[[MaskReport], object] | None = None,
) -> MaskReport:
    """Fill `.grad` of the parameters with the masked mean gradient of the environments' losses.

    It replaces `loss.backward()`. Like it, it adds to an existing `.grad` and leaves that of an unused parameter
    unchanged. A parameter that only some environments use has a zero gradient in the others. Parameters may be
    shared, frozen, of several dtypes and on several devices. `.grad` is written only if there was no error.

    Memory: with a list or a tensor, the graphs of all losses exist at once. With a generator,
    `(loss_of(batch) for batch in batches)`, one graph exists at a time, and the gradients need the same few buffers
    for any number of environments.

    Gradient accumulation: an environment may be an iterable of losses of its micro-batches, whose gradients
    are summed as by `Tensor.backward` (so divide each loss by their number). Accumulating over several calls
    would mask each micro-batch by itself, which is noisier.

    Mixed precision: pass the `torch.amp.GradScaler`. Losses are scaled, gradients are unscaled before
    the mask, and the result is scaled again, so that `scaler.unscale_`, `scaler.step` and `scaler.update`
    work as in PyTorch's documentation. Gradients that overflowed are NaN in `.grad`, and the scaler skips
    that step.

    Several processes: `processes` is required if `torch.distributed` is initialized with more than one process,
    with or without `DistributedDataParallel`, which does not average masked gradients. In a single process it has
    no effect.

    Environments must not influence each other in the forward pass. The usual cause is a batch-norm layer in
    training mode, which raises a warning once; see `sandmask.find_leaks`.

    :param losses: one scalar loss for each of at least two environments: a list, a tensor `[E]`, or any
        iterable.
    :param params: parameters, or `model.named_parameters()`, whose names then appear in errors and in the
        report.
    :param mask: for example `SANDMask(tau=0.8)`.
    :param processes: "merge" if every process has environments of its own: the mask compares those of all
        processes. "average" if every process has a part of each environment's data: the gradient of environment
        e is averaged over processes first, and the mask compares the averages. Both fill the same `.grad` in
        every process; all of them must call this. "alone" uses the losses of this process only.
    :param group: the process group; the default one if not given.
    :param scaler: `torch.amp.GradScaler` of mixed-precision training.
    :param retain_graph: keep the losses' graphs for another backward pass, such as one with another mask for other
        parameters.
    :param check_finite: raise a `MaskError` that names environment and parameter where a gradient is inf or NaN, or
        the environment where only the loss is, as that of an empty batch. It costs one synchronization with the
        device. It has no effect with a scaler, which checks this itself.
    :param on_report: called with the report once `.grad` is written, such as a `sandmask.diagnostics.MaskLogger`.
    :return: a report of what the mask did; until it is read, it costs no time and keeps the moments.

    >>> import torch, sandmask
    >>> w = torch.tensor([1.0, 1.0], requires_grad=True)
    >>> report = sandmask.backward([(w * w).sum(), (w[0] - w[1])], [w], sandmask.ANDMask(tau=1.0))
    >>> w.grad
    tensor([1.5000, 0.0000])
    >>> report.dead_fraction
    0.5
    """
    scaling = Scaling(scaler)
    collect = partial(collect_moments, scaling=scaling, retain_graph=retain_graph, check_finite=check_finite)
    return masked_backward(losses, params, mask, collect, scaling, processes, group, on_report)


def masked_backward(
    losses: Losses,
    params: Params,
    mask: Mask,
    collect: Callable[..., GradientMoments],
    scaling: Scaling,
    processes: Processes | None,
    group: dist.ProcessGroup | None,
    on_report: Callable[[MaskReport], object] | None,
) -> MaskReport:
    """Fill `.grad`, with `collect` to fold the losses' gradients into moments."""
    how = resolve_processes(processes, group)
    if how == "alone":
        named = checked_parameters(params, mask)
        if isinstance(losses, Collection) and not (isinstance(losses, Tensor) and losses.ndim != 1):
            check_count(len(losses))  # before any work is done
        moments = collect(losses, named, mask)
    else:
        named, moments = moments_of_processes(losses, params, mask, collect, how, group)
    report = fill_gradients(named, mask, moments, scaling)
    if on_report is not None:
        on_report(report)
    return report


@torch.enable_grad()
def collect_moments(
    losses: Losses,
    named: Mapping[str, Tensor],
    mask: Mask,
    scaling: Scaling,
    *,
    retain_graph: bool,
    check_finite: bool,
    transform: Callable[[Iterator[EnvironmentGradients]], Iterator[EnvironmentGradients]] | None = None,
) -> GradientMoments:
    """Fold every environment's gradients into moments. Does not change `.grad`.

    :param transform: applied to the gradients, unscaled, before they are folded.
    """
    params = list(named.values())

    def prepare(loss: Tensor) -> Tensor:
        check_graph(loss, params[0])
        scaling.check_unscaled(loss)
        if moments.finite is not None:
            _note_loss(moments.finite, moments.count, loss, at_once=transform is not None)
        return scaling.scale_loss(loss)

    moments = mask.new_moments(check_finite=check_finite and not scaling.active)
    environments = gradients_by_environment(losses, params, retain_graph=retain_graph, prepare=prepare)
    unscaled: Iterator[EnvironmentGradients] = map(scaling.unscale, environments)
    for gradients in unscaled if transform is None else transform(unscaled):
        moments.update(dict(zip(named, gradients, strict=True)))
    for name, param in named.items():  # `fully_shard` gives its parameters away only after a backward pass
        check_whole(name, param)
    return moments


def _note_loss(check: FiniteCheck, environment: int, loss: Tensor, *, at_once: bool) -> None:
    """Check a loss when the moments are read, or `at_once` where other processes have to be told."""
    if not at_once:
        check.record_loss(environment, loss)
    elif not math.isfinite(value := float(loss.detach())):
        raise loss_not_finite(environment, value)


@torch.no_grad()
def fill_gradients(named: Mapping[str, Tensor], mask: Mask, moments: GradientMoments, scaling: Scaling) -> MaskReport:
    """Write the masked gradients to `.grad`, or add them to an existing `.grad`."""
    masked = {name: grad for name, grad in mask.from_moments(moments).items() if grad is not None}
    if not masked:
        raise MaskError(
            "No loss depends on any of the tensors in `params`. Are they those of the model that made the losses?"
        )
    scaled = scaling.rescale(list(masked.values()), moments.sums.mean)
    for name, grad in zip(masked, scaled, strict=True):
        param = named[name]
        if param.grad is None:
            # Fused optimizers expect gradients in the memory layout of their parameters.
            dtype = getattr(param, "grad_dtype", None) or param.dtype  # which older versions of torch do not have
            same = grad.dtype == dtype and grad.stride() == param.stride()
            param.grad = grad if same else torch.empty_like(param, dtype=dtype).copy_(grad)
        else:
            param.grad.add_(grad)
    for param in (named[name] for name in masked):
        # `Tensor.backward` calls these hooks, which may remove themselves.
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):  # noqa: SLF001
            hook(param)
    watch_optimizer(next(iter(named.values())))
    return MaskReport(mask, moments)


# First parameters of models, held weakly: those whose optimizer has not stepped yet, and all that were ever watched.
_pending = WeakIdKeyDictionary()
_watched = WeakIdKeyDictionary()
_lock = threading.Lock()
_hooks: list[RemovableHandle] = []


def watch_optimizer(model_key: Tensor) -> None:
    """Check the first optimizer that steps with this parameter, which identifies its model.

    Parameters do not refer to their optimizer, so a hook sees the steps of all optimizers. The hook is not removed,
    since another thread may be running it, but returns at once if no model is pending.
    """
    if model_key in _watched:
        return
    with _lock:
        _watched[model_key] = _pending[model_key] = True
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_inspect))


def _inspect(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
    if torch.compiler.is_compiling() or len(_pending) == 0:
        return
    with _lock:
        found = [p for group in optimizer.param_groups for p in group["params"] if p in _pending]
        for param in found:
            del _pending[param]
    if found and any(_decays_decoupled(optimizer, group) for group in optimizer.param_groups):
        warn_once(
            "decoupled-weight-decay",
            f"Masked gradients are applied by {type(optimizer).__name__} with decoupled weight decay. Weights whose "
            "gradient is masked then hardly shrink, and what was learned from a single environment stays. Use "
            "`torch.optim.Adam(..., weight_decay=...)`, whose weight decay is part of the gradient, or set "
            "`weight_decay=0`.",
            stacklevel=4,  # the caller of `optimizer.step`
        )


# Decoupled weight decay is known by a flag in the groups (of torch, timm or pytorch-optimizer) or by part of a class's
# name. `Optimizer2State` is the base of bitsandbytes' Adam, whose weight decay is that of AdamW.
_FLAGS = ("decoupled_weight_decay", "decoupled_decay", "decoupled", "weight_decouple")
_CLASSES = ("AdamW", "Muon", "Adafactor", "Lion", "RAdamScheduleFree", "Optimizer2State")


def _decays_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    flagged = any(group.get(flag, False) for flag in _FLAGS)
    named = any(part in kind.__name__ for kind in type(optimizer).__mro__ for part in _CLASSES)
    return (flagged or named) and float(group.get("weight_decay", 0.0)) != 0.0
