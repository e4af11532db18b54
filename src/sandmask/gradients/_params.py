"""The parameters to fill, each once, by a name that error messages and reports can use."""

from collections.abc import Iterable

from torch import Tensor, nn

from sandmask.masks import Mask, MaskError

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]]


def trainable_parameters(params: Params) -> dict[str, Tensor]:
    """The parameters that require gradients by name, shared ones once.

    `named_parameters()` brings names; a plain parameter is called by its number and shape.
    """
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


def check_mask(mask: object) -> None:
    """The mistakes that are made: a class, and arguments in another order."""
    if isinstance(mask, Mask):
        return
    found = f"the class {mask.__name__}: call it" if isinstance(mask, type) else type(mask).__name__
    raise MaskError(f"Parameter `mask` should be a mask, such as `SANDMask(tau=0.8)`. Found {found}.")


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
