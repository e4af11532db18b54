"""Weights from a file: reading it, and fitting its tensors to a timm model."""

import pickle
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sandmask.errors import SandmaskError
from sandmask.networks._timm import layer_names
from sandmask.networks.recognize import advice, other_namesake

_WRAPPERS = ("state_dict", "model_state_dict", "model", "teacher", "params")
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "featurizer.")
_NOT_NEEDED = "num_batches_tracked"  # a count for running averages, which are constants here
_CONVERSION_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

StateDict = dict[str, Tensor]


def load_weights(path: str | Path) -> StateDict:
    """Read a safetensors or PyTorch file (tensors only, no code) as a state dict of float32 tensors.

    `{"state_dict": ...}` and prefixes of wrappers, such as `module.`, are unwrapped.

    :param path: file with a state dict.
    """
    path = Path(path)
    if not path.is_file():
        raise SandmaskError(f"There is no weights file {path}. Give the path of a .safetensors or .pth file.")
    content = _read_safetensors(path) if _is_safetensors(path) else _read_torch(path)
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors or not all(isinstance(name, str) for name in tensors):
        raise SandmaskError(f"{path} holds no tensors by name. Give a file that holds a model's state dict.")
    return {name: _full_precision(value, name, path) for name, value in _strip_prefixes(tensors).items()}


def _is_safetensors(path: Path) -> bool:
    """By the content, because files get renamed: 8 bytes with the length of a header, then JSON."""
    with path.open("rb") as file:
        start = file.read(9)
    return start[8:] == b"{" or (path.suffix.lower() == ".safetensors" and not start.startswith((b"PK", b"\x80")))


def _read_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise SandmaskError(f"{path} cannot be read as safetensors: {error}. Fetch the file again.") from error


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's notes on the formats of old files
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise SandmaskError(
            f"{path} cannot be read as a PyTorch file of tensors. A file that also holds Python objects is "
            "refused, since its code would run: save the state dict alone, to .safetensors or .pth."
        ) from error
    except Exception as error:  # damaged files raise errors of any type
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SandmaskError(f"{path} cannot be read as a PyTorch file: {reason}. Fetch the file again.") from error


def _strip_prefixes(tensors: StateDict) -> StateDict:
    while prefix := next((p for p in _PREFIXES if all(name.startswith(p) for name in tensors)), None):
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def _full_precision(value: Tensor, name: str, path: Path) -> Tensor:
    """Return a tensor of floats as float32, and one of integers unchanged; raise for others and for NaN or inf."""
    if value.layout is not torch.strided or value.is_quantized or value.is_complex() or value.is_meta:
        raise SandmaskError(f"{path}: the tensor {name} is sparse, quantized, complex or empty. Give a file of floats.")
    if not value.is_floating_point():
        return value
    value = value.float()
    if not value.isfinite().all():
        raise SandmaskError(f"{path}: the tensor {name} contains NaN or inf. Give another file.")
    return value


def fit_weights(weights: Mapping[str, Tensor], model: nn.Module, name: str, source: str) -> StateDict:
    """Return the state dict that fits a model without its last layer; raise if something is missing.

    The last layer of the weights is dropped, the first convolution is adapted to the number of input channels (as timm
    does: summed for one channel, otherwise repeated and scaled to the same sum), and position embeddings to the image
    size.

    :param weights: the tensors by name.
    :param model: the timm model.
    :param name: name of the model.
    :param source: what messages call the weights: the path of their file, for instance.
    """
    wanted = model.state_dict()
    fitted = _adapt(dict(weights), wanted, name, source)
    if _misfits(fitted, wanted):
        converted = _convert(dict(weights), model)
        if converted is not None:
            fitted = _adapt(converted, wanted, name, source)
    if misfits := _misfits(fitted, wanted):
        raise SandmaskError(f"{source} does not fit the network {name!r}: {misfits}. {advice(weights, name, source)}")
    if other := other_namesake(weights, name, source):
        warnings.warn(
            f"{source} is named after the network {other!r} and was loaded into {name!r}. Their tensors have the same "
            f"shapes, but padding or normalization differ: if it was trained as {other!r}, choose --network {other}.",
            stacklevel=2,
        )
    return fitted


def _convert(weights: StateDict, model: nn.Module) -> StateDict | None:
    """Convert weights with other names or image sizes; timm has functions for this for some families of models."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return None
    try:
        return dict(convert(weights, model))
    except _CONVERSION_ERRORS:
        return None  # these are weights of another family


def _adapt(weights: StateDict, wanted: StateDict, name: str, source: str) -> StateDict:
    """Drop the last layer, and adapt the first convolution to the number of input channels."""
    from timm.models import adapt_input_conv

    last = tuple(f"{layer}." for layer in layer_names(name, "classifier"))
    weights = {k: v for k, v in weights.items() if not k.startswith(last)}
    for key in (f"{layer}.weight" for layer in layer_names(name, "first_conv")):
        if key not in weights or key not in wanted or weights[key].shape == wanted[key].shape:
            continue
        n_channels = wanted[key].shape[1]
        try:
            weights[key] = adapt_input_conv(n_channels, weights[key])
        except (NotImplementedError, AssertionError) as error:
            raise SandmaskError(
                f"{source}: the first layer cannot be adapted to {n_channels} input channels ({error}). "
                "Use --weights none or another network."
            ) from error
    return weights


def _misfits(weights: StateDict, wanted: StateDict) -> str:
    """Describe tensors that are missing, unexpected or of another shape; empty if all fit."""
    missing = [key for key in wanted if key not in weights and not key.endswith(_NOT_NEEDED)]
    unexpected = [key for key in weights if key not in wanted]
    reshaped = [
        f"{key} {list(weights[key].shape)} instead of {list(wanted[key].shape)}"
        for key in weights
        if key in wanted and weights[key].shape != wanted[key].shape
    ]
    reshaped += [
        f"{key} holds integers"
        for key in weights
        if key in wanted and wanted[key].is_floating_point() and not weights[key].is_floating_point()
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape or type", reshaped))
    return "; ".join(_some(items, kind) for kind, items in kinds if items)


def _some(items: list[str], kind: str) -> str:
    more = ", ..." if len(items) > 3 else ""
    return f"{len(items)} tensor{'s' * (len(items) > 1)} {kind} ({', '.join(items[:3])}{more})"
