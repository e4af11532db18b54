"""Check arguments: parameters, masks, models and batches; and whether environments may share a pass."""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from sandmask.masks import Mask, MaskError

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]]
Batches = list[tuple[Tensor, Tensor]]
Method = Literal["auto", "loop", "batched"]

# "auto" keeps all gradients at once up to this many elements in all (E x P); a loop keeps one environment's at a time.
AT_ONCE_LIMIT = 128 * 1024 * 1024


def checked_parameters(params: Params, mask: object) -> dict[str, Tensor]:
    """Check parameters and mask. Return the parameters that require gradients by name, shared ones once.

    A parameter without a name is named by its number and shape.
    """
    if not isinstance(mask, Mask):  # common mistakes are its class, and arguments in another order
        found = f"the class {mask.__name__}: call it" if isinstance(mask, type) else type(mask).__name__
        raise MaskError(f"Parameter `mask` should be a mask, such as `SANDMask(tau=0.8)`. Found {found}.")
    if isinstance(params, nn.Module):
        raise MaskError("Parameter `params` should be an iterable of parameters. Pass `model.named_parameters()`.")
    if isinstance(params, Tensor):
        raise MaskError("Parameter `params` should be an iterable of tensors. Pass `[tensor]`.")
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for number, item in enumerate(params):
        name, param = _named(item, number)
        if id(param) in seen or not param.requires_grad:
            continue
        if not param.is_leaf:
            raise MaskError(
                f"Every tensor in `params` should be a leaf, whose `.grad` can be filled. "
                f"Found {name}, which is computed from others."
            )
        check_whole(name, param)
        seen.add(id(param))
        named[_unused(name, named)] = param
    if not named:
        raise MaskError(
            "Parameter `params` should hold at least one tensor that requires a gradient. Found none. "
            "Was a generator such as `model.parameters()` used up by an earlier call?"
        )
    return named


def check_whole(name: str, param: Tensor) -> None:
    """Raise for a parameter of which this process holds only a part."""
    if any(kind.__name__ == "DTensor" for kind in type(param).__mro__):
        what = "a DTensor (`fully_shard`, tensor parallelism)"
    elif getattr(param, "_fsdp_flattened", False):
        what = "managed by FullyShardedDataParallel"
    elif type(param) is nn.Parameter and param.numel() > 0 and param.untyped_storage().nbytes() == 0:
        what = "managed by `fully_shard`, which freed it after the backward pass"
    else:
        return
    raise MaskError(
        f"`{name}` is {what}: masks do not support parameters that are sharded over processes. "
        "Give every process the whole model, with or without `DistributedDataParallel`."
    )


def _named(item: object, number: int) -> tuple[str, Tensor]:
    if isinstance(item, Tensor):
        return f"parameter {number} of shape {tuple(item.shape)}", item
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor):
        return item
    raise MaskError(
        "Parameter `params` should hold tensors or (name, tensor) pairs. "
        f"Found {type(item).__name__} at position {number}."
    )


def _unused(name: str, taken: dict[str, Tensor]) -> str:
    """Two models may use the same names."""
    if name not in taken:
        return name
    return next(f"{name} ({n})" for n in range(2, len(taken) + 3) if f"{name} ({n})" not in taken)


def check_request(model: nn.Module, method: str, chunk_size: int | None) -> None:
    """Check the types and values of arguments."""
    if not isinstance(model, nn.Module):
        raise MaskError(f"Parameter `model` should be a `torch.nn.Module`. Found {type(model).__name__}.")
    if method not in get_args(Method):
        raise MaskError(f"Parameter `method` should be one of {get_args(Method)}. Found `method` = {method!r}.")
    if chunk_size is not None and chunk_size < 1:
        raise MaskError(f"Parameter `chunk_size` should be at least 1. Found `chunk_size` = {chunk_size}.")


def check_batches(batches: Iterable[tuple[Tensor, Tensor]], *, per_sample: bool) -> Batches:
    """One batch per environment; with `per_sample`, one of a single example each."""
    found = list(batches)
    if not found:
        raise MaskError("Parameter `batches` should hold a batch (x, y) for each environment. Found none.")
    for e, batch in enumerate(found):
        if not isinstance(batch, tuple | list) or [isinstance(part, Tensor) for part in batch] != [True, True]:
            raise MaskError(f"Parameter `batches` should hold pairs (x, y) of tensors. That of environment {e} is not.")
        x, y = batch
        if x.ndim == 0 or y.ndim == 0 or x.shape[0] != y.shape[0] or y.shape[0] == 0:
            raise MaskError(
                "Parameter `batches` should hold as many inputs as targets, at least one. "
                f"Environment {e} has inputs of shape {tuple(x.shape)} and targets of shape {tuple(y.shape)}."
            )
    if per_sample:
        return [(x[i : i + 1], y[i : i + 1]) for x, y in found for i in range(len(y))]
    return [(x, y) for x, y in found]


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that gradients are taken of."""
    params: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, param in params.items():
        if is_lazy(param):
            raise MaskError(f"`{name}` has no shape yet, because its module is lazy. Call the model once before.")
        if param.is_complex():
            raise MaskError(
                f"`{name}` should be of a real floating-point dtype. Found {param.dtype}. Make its real and imaginary "
                "parts a real parameter, and use `torch.view_as_complex` of it."
            )
        check_whole(name, param)
    if not params:
        raise MaskError(
            "Parameter `model` should have a parameter that requires a gradient. Found none: all are frozen."
        )
    return params


def choose_method(method: Method, model: nn.Module, params: Mapping[str, Tensor], at_once: int) -> Method:
    """Choose "loop" if environments need separate passes, or if `at_once` gradients take too much memory."""
    reason = None if method == "loop" else why_apart(model, params)
    if reason is not None and method == "batched":
        raise MaskError(f'The environments cannot be batched: {reason}. Use method="loop".')
    too_many = at_once * sum(p.numel() for p in params.values()) > AT_ONCE_LIMIT
    return "loop" if reason is not None or (method == "auto" and too_many) else method


def why_apart(model: nn.Module, params: Mapping[str, Tensor]) -> str | None:
    """The reason why every environment needs its own pass, if there is one."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.training and module.running_mean is not None:
            return f"`{name}` updates its running statistics with every batch"
    hooked = [name for name, param in params.items() if param._backward_hooks]  # noqa: SLF001
    return f"`{hooked[0]}` has a hook, which is called with one environment's gradient" if hooked else None
