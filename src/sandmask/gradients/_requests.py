"""Check what gradients are asked for, of which model and batches, and whether environments may share a pass."""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sandmask.gradients._params import check_whole
from sandmask.masks import MaskError

Batches = list[tuple[Tensor, Tensor]]
Method = Literal["auto", "loop", "batched"]

# "auto" keeps all gradients at once up to this many elements in all (E x P); a loop keeps one environment's at a time.
AT_ONCE_LIMIT = 128 * 1024 * 1024


def check_request(model: nn.Module, method: str, chunk_size: int | None) -> None:
    """Raise for arguments that are no model, no method or no size."""
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
            raise MaskError(f"Parameter `batches` should hold pairs (x, y) of tensors. Environment {e} has none.")
        x, y = batch
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(y) == 0:
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
        check_whole(name, param)
    if not params:
        raise MaskError(
            "Parameter `model` should have a parameter that requires a gradient. Found none: all are frozen."
        )
    return params


def choose_method(method: Method, model: nn.Module, params: Mapping[str, Tensor], at_once: int) -> Method:
    """ "loop" where environments have to be taken one after the other, or are better; `at_once` are kept if not."""
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
