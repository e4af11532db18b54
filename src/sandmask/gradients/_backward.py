"""`sandmask.backward`: what `loss.backward()` is to one loss, for one loss an environment and a mask."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from sandmask.gradients._graph import check_graph
from sandmask.gradients._losses import Losses, gradients_by_environment
from sandmask.gradients._params import Params, check_mask, trainable_parameters
from sandmask.gradients._report import MaskReport
from sandmask.gradients._scaling import Scaling
from sandmask.masks import GradientMoments, Mask, MaskError
from sandmask.masks._evaluate import check_count


def backward(
    losses: Losses,
    params: Params,
    mask: Mask,
    *,
    scaler: GradScaler | None = None,
    retain_graph: bool = False,
    check_finite: bool = True,
    on_report: Callable[[MaskReport], object] | None = None,
) -> MaskReport:
    """Fill `.grad` of the parameters with the masked mean gradient of the environments' losses.

    Stands where `loss.backward()` stood: like it, adds to a `.grad` that is there, and leaves that of an
    unused parameter alone. A parameter that only some environments use has a zero gradient in the others.
    Parameters may be shared, frozen, of several dtypes and on several devices. `.grad` is written only
    after all has gone well.

    Memory: with a list or a tensor, the graphs of all losses exist at once, because they exist already.
    Pass a generator, `(loss_of(batch) for batch in batches)`, and one graph exists at a time; gradients
    take the same few buffers however many environments there are.

    Gradient accumulation: an environment may be an iterable of losses of its micro-batches, whose gradients
    are added up as `Tensor.backward` would (so divide each loss by their number). Accumulating masked
    gradients of several calls instead would mask each micro-batch by itself, which is noisier.

    Mixed precision: pass the `torch.amp.GradScaler`. Losses are scaled, gradients unscaled before they meet
    the mask, and the result is scaled again, so that `scaler.unscale_`, `scaler.step` and `scaler.update`
    go on as in PyTorch's documentation. Gradients that overflowed reach `.grad` as NaN, and the scaler
    skips that step.

    Environments must not see each other in the forward pass. A batch-norm layer in training mode is the
    usual way they do, and is warned about once; see `sandmask.find_leaks`.

    :param losses: one scalar loss for each of at least two environments: a list, a tensor `[E]`, or any
        iterable.
    :param params: parameters, or `model.named_parameters()`, whose names then appear in errors and in the
        report.
    :param mask: for example `SANDMask(tau=0.8)`.
    :param scaler: of mixed-precision training.
    :param retain_graph: keep the losses' graphs for another backward pass, such as one with another mask for other
        parameters.
    :param check_finite: raise a `MaskError` that names parameter and environment where a gradient is inf or
        NaN. It costs one synchronization with the device. Without effect if a scaler is given, which looks
        itself.
    :param on_report: called with the report once `.grad` is written, such as a `sandmask.diagnostics.MaskLogger`.
    :return: what the mask did; costs nothing unless it is read.

    >>> import torch, sandmask
    >>> w = torch.tensor([1.0, 1.0], requires_grad=True)
    >>> report = sandmask.backward([(w * w).sum(), (w[0] - w[1])], [w], sandmask.ANDMask(tau=1.0))
    >>> w.grad
    tensor([1.5000, 0.0000])
    >>> report.dead_fraction
    0.5
    """
    check_mask(mask)
    named = trainable_parameters(params)
    if isinstance(losses, Collection) and not (isinstance(losses, Tensor) and losses.ndim != 1):
        check_count(len(losses))  # before any work is done
    scaling = Scaling(scaler)
    moments = collect_moments(losses, named, mask, scaling, retain_graph=retain_graph, check_finite=check_finite)
    report = fill_gradients(named, mask, moments, scaling)
    if on_report is not None:
        on_report(report)
    return report


@torch.enable_grad()  # what is asked for are gradients
def collect_moments(
    losses: Losses,
    named: Mapping[str, Tensor],
    mask: Mask,
    scaling: Scaling,
    *,
    retain_graph: bool,
    check_finite: bool,
) -> GradientMoments:
    """Fold every environment's gradients into moments, and leave `.grad` alone."""
    params = list(named.values())
    moments = mask.new_moments(check_finite=check_finite and not scaling.active)
    environments = gradients_by_environment(
        losses,
        params,
        retain_graph=retain_graph,
        scale=scaling.scale_loss,
        on_first_loss=lambda loss: check_graph(loss, params[0]),
    )
    for gradients in environments:
        moments.update(dict(zip(named, scaling.unscale(gradients), strict=True)))
    return moments


@torch.no_grad()
def fill_gradients(named: Mapping[str, Tensor], mask: Mask, moments: GradientMoments, scaling: Scaling) -> MaskReport:
    """Write the masked gradients to `.grad`, or add them to what is there."""
    masked = {name: grad for name, grad in mask.from_moments(moments).items() if grad is not None}
    if not masked:
        raise MaskError(
            "No loss depends on any of the tensors in `params`. Are they those of the model that made the losses?"
        )
    scaled = scaling.rescale(list(masked.values()), moments.sums.mean)
    for name, grad in zip(masked, scaled, strict=True):
        param = named[name]
        if param.grad is None:
            # A gradient lies in memory as its parameter does: fused optimizers count on it.
            same = grad.dtype == param.dtype and grad.stride() == param.stride()
            param.grad = grad if same else torch.empty_like(param).copy_(grad)
        else:
            param.grad.add_(grad)
    for param in (named[name] for name in masked):
        for hook in (param._post_accumulate_grad_hooks or {}).values():  # noqa: SLF001 - `Tensor.backward` calls them
            hook(param)
    return MaskReport(mask, moments)
