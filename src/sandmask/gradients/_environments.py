"""Per-environment gradients of a model: one environment after the other, or many at once. The numbers are the same."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from sandmask.gradients._backward import fill_gradients
from sandmask.gradients._one_pass import NoParameters, OnePass, UnsupportedError
from sandmask.gradients._params import check_mask, trainable_parameters
from sandmask.gradients._report import MaskReport
from sandmask.gradients._scaling import Scaling
from sandmask.masks import GradientMoments, Mask, MaskError

LossFunction = Callable[[Tensor, Tensor], Tensor]
Batches = Sequence[tuple[Tensor, Tensor]]
Method = Literal["auto", "loop", "batched"]
NamedGradients = dict[str, Tensor]

# "auto" stacks gradients up to this many elements in all (E x P); a loop keeps one environment's at a time.
STACK_LIMIT = 128 * 1024 * 1024


def environment_gradients(
    model: nn.Module, loss_fn: LossFunction, batches: Batches, method: Method = "auto", *, per_sample: bool = False
) -> NamedGradients:
    """Gradients of `loss_fn(model(x), y)` for each environment's batch `(x, y)`, stacked: name -> `[E, *shape]`.

    Environments are in the order of `batches`; their batches may differ in size. With `per_sample` every example is an
    environment of its own, as in ILC. Frozen parameters are left out. Keeps all E gradients: for a large model, or
    many examples, use `environment_moments`, which does not.

    :param method: "loop" takes one environment after the other (the reference, and lightest on memory); "batched" takes
        all in one forward and backward pass over their concatenated batches, in which layers keep the environments'
        weight gradients apart, or, for models that use parameters outside of the usual layers, with `torch.func.vmap`;
        "auto" chooses. The model should treat the first dimension of its input as examples.
    """
    stacks = list(_stacks(model, loss_fn, batches, method, per_sample=per_sample, chunk_size=None))
    order = torch.tensor([e for envs, _ in stacks for e in envs]).argsort()
    together = {name: torch.cat([grads[name] for _, grads in stacks]) for name in stacks[0][1]}
    return {name: stack[order.to(stack.device)] for name, stack in together.items()}


def environment_moments(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Batches,
    method: Method = "auto",
    *,
    per_sample: bool = False,
    chunk_size: int | None = None,
    log_magnitude: bool = False,
    check_finite: bool = True,
) -> GradientMoments:
    """The same gradients, folded into moments as they come.

    With "loop", memory does not grow with the number of environments; "auto" turns to it when all environments'
    gradients together would have more than 128 million elements.

    Give the result to `mask.from_moments`, or to `sandmask.set_gradients` to fill `.grad`.

    :param chunk_size: how many environments "batched" takes at once, through `vmap` (all, if not given).
    """
    _check(batches, method, chunk_size)
    if method != "loop" and not per_sample and chunk_size is None and not log_magnitude:
        folded = _folded(model, loss_fn, batches, method, check_finite=check_finite)
        if folded is not None:
            return folded
    stacks = _stacks(model, loss_fn, batches, method, per_sample=per_sample, chunk_size=chunk_size)
    envs, first = next(stacks)
    moments = GradientMoments.of_stack(first, log_magnitude=log_magnitude, check_finite=check_finite, numbers=envs)
    for envs, grads in stacks:
        moments.update_stack(grads, numbers=envs)
    return moments


def set_gradients(named_params: Iterable[tuple[str, Tensor]], mask: Mask, moments: GradientMoments) -> MaskReport:
    """Mask moments that came from `environment_moments`, and fill or add to `.grad`, as `backward` does.

    :param named_params: `model.named_parameters()`; names are how moments and parameters find each other.

    >>> import torch, sandmask
    >>> model = torch.nn.Linear(2, 1)
    >>> batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(3)]
    >>> moments = sandmask.environment_moments(model, torch.nn.functional.mse_loss, batches)
    >>> report = sandmask.set_gradients(model.named_parameters(), sandmask.ANDMask(tau=1.0), moments)
    >>> model.weight.grad.shape
    torch.Size([1, 2])
    """
    check_mask(mask)
    named = trainable_parameters(named_params)
    if missing := [name for name in moments.names if name not in named]:
        raise MaskError(
            f"Parameter `named_params` should name the tensors of the moments. {missing[0]!r} is not among them: "
            "give `model.named_parameters()` of the same model."
        )
    return fill_gradients(named, mask, moments, Scaling(None))


def _stacks(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Batches,
    method: Method,
    *,
    per_sample: bool,
    chunk_size: int | None,
) -> Iterator[tuple[list[int], NamedGradients]]:
    """Pieces of the result: numbers of some environments, and their stacked gradients."""
    _check(batches, method, chunk_size)
    if per_sample:
        batches = [(x[i : i + 1], y[i : i + 1]) for x, y in batches for i in range(len(y))]
    params = _trainable(model)
    if method == "loop" or (method == "auto" and _too_many(params, len(batches))):
        yield from _loop(model, loss_fn, batches, params)
        return
    # What fails here may well work in a loop (`vmap` takes no branch on a value); if not, that has the plainer error.
    refused = (UnsupportedError, RuntimeError) if method == "auto" else (UnsupportedError,)
    if not per_sample and chunk_size is None:
        try:
            found = _one_pass(model, loss_fn, batches, params).gradients()
        except refused:
            if method == "auto" and _convolves(model):
                yield from _loop(model, loss_fn, batches, params)
                return
        else:
            yield list(range(len(batches))), found
            return
    pieces = _vmapped(model, loss_fn, batches, params, chunk_size)
    try:
        first = next(pieces)
    except refused as error:
        if method == "batched":
            raise MaskError(f'The environments cannot be batched: {error}. Use method="loop".') from error
        yield from _loop(model, loss_fn, batches, params)
    else:
        yield first
        yield from pieces


def _trainable(model: nn.Module) -> NamedGradients:
    params: NamedGradients = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise MaskError(
            "Parameter `model` should have a parameter that requires a gradient. Found none: all are frozen."
        )
    return params


def _folded(
    model: nn.Module, loss_fn: LossFunction, batches: Batches, method: Method, *, check_finite: bool
) -> GradientMoments | None:
    """Moments that were folded layer by layer in one pass, on a CPU; None where that cannot be, or where a gradient is
    not finite: then the other ways have an error to name.
    """
    params = _trainable(model)
    on_cpu = all(param.device.type == "cpu" for param in params.values())
    if not on_cpu or (method == "auto" and _too_many(params, len(batches))):
        return None
    try:
        found = _one_pass(model, loss_fn, batches, params, fold=True).moments()
    except (UnsupportedError, RuntimeError):
        return None
    if len(found) < len(params) or (check_finite and not all(m.mean.isfinite().all() for m in found.values())):
        return None
    return GradientMoments.of_named({name: found[name] for name in params}, params, check_finite=check_finite)


def _one_pass(
    model: nn.Module, loss_fn: LossFunction, batches: Batches, params: NamedGradients, *, fold: bool = False
) -> OnePass:
    sizes = [len(y) for _, y in batches]
    if len({(x.shape[1:], x.dtype, x.device) for x, _ in batches}) > 1:
        raise UnsupportedError("the environments' examples differ in shape or type")
    tape = OnePass(params, sizes, fold=fold)
    with tape:
        output = model(torch.cat([x for x, _ in batches]))
        if not isinstance(output, Tensor) or len(output) != sum(sizes):
            raise UnsupportedError("the model's output is not one tensor with a row an example")
        parts = zip(torch.split(output, sizes), batches, strict=True)
        losses = [loss_fn(rows, y) for rows, (_, y) in parts]
    tape.run(losses, list(params.values()))
    return tape


def _loop(
    model: nn.Module, loss_fn: LossFunction, batches: Batches, params: NamedGradients
) -> Iterator[tuple[list[int], NamedGradients]]:
    for e, (x, y) in enumerate(batches):
        loss = loss_fn(model(x), y)
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        yield [e], {name: g.unsqueeze(0) for name, g in zip(params, grads, strict=True)}


def _vmapped(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Batches,
    params: NamedGradients,
    chunk_size: int | None = None,
) -> Iterator[tuple[list[int], NamedGradients]]:
    def loss(values: NamedGradients, x: Tensor, y: Tensor) -> Tensor:
        output = functional_call(model, values, (x,))
        with NoParameters(params):  # the loss would see the model's own, not those that gradients are taken of
            return loss_fn(output, y)

    gradients = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    values = {name: p.detach() for name, p in params.items()}
    for envs in _same_shape(batches, chunk_size or len(batches)):
        x = torch.stack([batches[e][0] for e in envs])
        y = torch.stack([batches[e][1] for e in envs])
        yield envs, gradients(values, x, y)


def _same_shape(batches: Batches, chunk_size: int) -> Iterator[list[int]]:
    """Environments whose batches have the same shapes, at most `chunk_size` at a time."""
    groups: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for e, (x, y) in enumerate(batches):
        groups.setdefault((x.shape, y.shape), []).append(e)
    for envs in groups.values():
        yield from (envs[i : i + chunk_size] for i in range(0, len(envs), chunk_size))


def _too_many(params: NamedGradients, n_envs: int) -> bool:
    """Whether all environments' gradients together would take too much memory."""
    return n_envs * sum(p.numel() for p in params.values()) > STACK_LIMIT


def _convolves(model: nn.Module) -> bool:
    """The vmap of a convolution's weight gradient is a grouped convolution, slower than one after the other."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return any(isinstance(module, convolutions) for module in model.modules())


def _check(batches: Batches, method: str, chunk_size: int | None) -> None:
    if method not in get_args(Method):
        raise MaskError(f"Parameter `method` should be one of {get_args(Method)}. Found `method` = {method!r}.")
    if chunk_size is not None and chunk_size < 1:
        raise MaskError(f"Parameter `chunk_size` should be at least 1. Found `chunk_size` = {chunk_size}.")
    if len(batches) == 0:
        raise MaskError("Parameter `batches` should hold a batch (x, y) for each environment. Found none.")
    for e, (x, y) in enumerate(batches):
        if len(x) != len(y) or len(y) == 0:
            raise MaskError(
                f"Parameter `batches` should hold as many inputs as targets, at least one. Environment {e} has "
                f"{len(x)} inputs and {len(y)} targets."
            )
