"""Read weights from a file, adapt them to a timm model, and suggest other networks if they do not fit."""

import json
import pickle
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sandmask._text import counted, first_line
from sandmask.errors import SandmaskError
from sandmask.networks._timm import import_timm, layer_names

_WRAPPERS = ("state_dict", "model_state_dict", "model", "teacher", "params")
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "featurizer.")
_NOT_NEEDED = "num_batches_tracked"  # a counter of batch-norm, which is not used here
_CONVERSION_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# Architectures that are tried in this order if the name of a file does not name one.
_COMMON = (
    "resnet50", "resnet18", "resnet34", "resnet101", "resnet152", "resnext50_32x4d", "wide_resnet50_2",
    "vit_small_patch16_224", "vit_base_patch16_224", "vit_base_patch32_224", "vit_large_patch16_224",
    "vit_small_patch14_dinov2", "vit_base_patch14_dinov2", "vit_large_patch14_dinov2",
    "efficientnet_b0", "efficientnet_lite0", "mobilenetv3_large_100", "convnext_tiny", "convnext_base",
    "swin_tiny_patch4_window7_224", "densenet121", "regnety_016",
)  # fmt: skip
_FOLDERS = 4  # how many folders above a file may be named after its model; as many as in the cache of the Hub

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
    """Whether the content is safetensors (8 bytes with the length of a header, then JSON), whatever the file's name."""
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
        raise SandmaskError(
            f"{path} cannot be read as a PyTorch file: {first_line(error)}. Fetch the file again."
        ) from error


def _strip_prefixes(tensors: StateDict) -> StateDict:
    while prefix := next((p for p in _PREFIXES if all(name.startswith(p) for name in tensors)), None):
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def _full_precision(value: Tensor, name: str, path: Path) -> Tensor:
    """Return floats as float32 and integers unchanged. Raise an error for other tensors, and for NaN or inf."""
    if value.layout is not torch.strided or value.is_quantized or value.is_complex() or value.is_meta:
        raise SandmaskError(f"{path}: the tensor {name} is sparse, quantized, complex or empty. Give a file of floats.")
    if not value.is_floating_point():
        return value
    value = value.float()
    if not value.isfinite().all():
        raise SandmaskError(f"{path}: the tensor {name} contains NaN or inf. Give another file.")
    return value


def fit_weights(weights: Mapping[str, Tensor], model: nn.Module, name: str, source: str) -> StateDict:
    """Return the state dict that fits a model without its last layer. Raise an error if something is missing.

    The last layer of the weights is dropped. The first convolution is adapted to the number of input channels, as in
    timm: it is summed for one channel, and otherwise repeated and scaled to the same sum. Position embeddings are
    adapted to the image size.

    `name` is the name of the timm model, and `source` the name of the weights in messages, such as their path.
    """
    wanted = model.state_dict()
    fitted = _adapt(weights, wanted, name, source)
    if _misfits(fitted, wanted):
        fitted = _adapt(_converted(weights, model), wanted, name, source)
    if misfits := _misfits(fitted, wanted):
        raise SandmaskError(f"{source} does not fit the network {name!r}: {misfits}. {_advice(weights, name, source)}")
    if other := _other_namesake(weights, name, source):
        warnings.warn(
            f"{source} is named after the network {other!r} and was loaded into {name!r}. Their tensors have the same "
            f"shapes, but padding or normalization differ: if it was trained as {other!r}, choose --network {other}.",
            stacklevel=2,
        )
    return fitted


def _converted(weights: Mapping[str, Tensor], model: nn.Module) -> StateDict:
    """Convert names of tensors and image sizes with timm's function for the family of the model, if there is one."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    with suppress(*_CONVERSION_ERRORS):  # raised for weights of another family
        if convert is not None:
            return dict(convert(dict(weights), model))
    return dict(weights)


def _adapt(weights: Mapping[str, Tensor], wanted: StateDict, name: str, source: str) -> StateDict:
    """Drop the last layer, and adapt the first convolution to the number of input channels."""
    from timm.models import adapt_input_conv

    adapted = _without_last_layer(weights, name)
    for key in (f"{layer}.weight" for layer in layer_names(name, "first_conv")):
        if key not in adapted or key not in wanted or adapted[key].shape == wanted[key].shape:
            continue
        n_channels = wanted[key].shape[1]
        try:
            adapted[key] = adapt_input_conv(n_channels, adapted[key])
        except (NotImplementedError, AssertionError) as error:
            raise SandmaskError(
                f"{source}: the first layer cannot be adapted to {n_channels} input channels ({error}). "
                "Use --weights none or another network."
            ) from error
    return adapted


def _without_last_layer(weights: Mapping[str, Tensor], name: str) -> StateDict:
    last = tuple(f"{layer}." for layer in layer_names(name, "classifier"))
    return {key: value for key, value in weights.items() if not key.startswith(last)}


def _misfits(weights: StateDict, wanted: StateDict) -> str:
    """Describe tensors that are missing, unexpected or of another shape; empty if all fit."""
    missing = [key for key in wanted if key not in weights and not key.endswith(_NOT_NEEDED)]
    unexpected = [key for key in weights if key not in wanted]
    pairs = {key: (weights[key], wanted[key]) for key in weights if key in wanted}
    others = [f"{k} {list(a.shape)} instead of {list(b.shape)}" for k, (a, b) in pairs.items() if a.shape != b.shape]
    others += [
        f"{k} holds integers" for k, (a, b) in pairs.items() if b.is_floating_point() and not a.is_floating_point()
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape or type", others))
    return "; ".join(
        f"{counted(len(items), 'tensor')} {kind} ({', '.join(items[:3])}{', ...' if len(items) > 3 else ''})"
        for kind, items in kinds
        if items
    )


def _advice(weights: Mapping[str, Tensor], network: str, source: str) -> str:
    """Return what to do with weights that do not fit a network: the architectures that they fit, if any is found."""
    named = _named_by(source)
    found = next((name for name in (*named, *_COMMON) if import_timm().is_model(name) and _fits(weights, name)), None)
    fitting = [name for name in _alike(found) if name == found or _fits(weights, name)] if found else []
    if found is None or network.partition(".")[0] in fitting:
        return "Give a file for this network, or --weights none."
    if found not in named and len(fitting) > 1:
        return (
            f"It fits the networks {', '.join(map(repr, fitting))}. Their tensors have the same shapes, but they "
            "compute differently (padding, normalization): choose the one that the file was trained as with --network."
        )
    others = ", ".join(repr(name) for name in fitting if name != found)
    same = f" (Tensors of the same shapes, but other padding or normalization: {others}.)" if others else ""
    return f"It looks like weights for {found!r}: choose --network {found}, or another file.{same}"


def _other_namesake(weights: Mapping[str, Tensor], network: str, source: str) -> str | None:
    """Return the architecture that a file is named after, if it is not `network` and the weights fit it, too."""
    own = network.partition(".")[0]
    named = _named_by(source)
    if not named or named[0] == own or named[0] not in _alike(own) or not _fits(weights, named[0]):
        return None
    return named[0]


def _named_by(source: str) -> list[str]:
    """Return the architectures named in a file's metadata, in its name and in the names of its folders.

    The metadata comes first. Longer names come before shorter ones.
    """
    models = import_timm().list_models() if Path(source).is_file() else []
    found: dict[str, None] = {}
    for hint in _hints(Path(source)):
        words = "_" + re.sub(r"[^a-z0-9]+", "_", hint.lower()) + "_"
        # resnet50 is not in resnet501, because a digit continues the number; letters may follow.
        inside = [name for name in models if re.search(rf"_{re.escape(name)}(?![0-9])", words)]
        found.update(dict.fromkeys(sorted(inside, key=len, reverse=True)))
    return list(found)


def _hints(path: Path) -> Iterator[str]:
    """Yield texts that may name the architecture of a file, the most reliable first."""
    with suppress(OSError, ValueError, AttributeError):  # timm's models on the Hub have this file
        yield str(json.loads((path.parent / "config.json").read_text(encoding="utf-8")).get("architecture", ""))
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            yield from map(str, (file.metadata() or {}).values())
    yield path.stem
    yield from (folder.name for folder in list(path.parents)[:_FOLDERS])


def _alike(architecture: str) -> list[str]:
    """Return the architecture and those with the same end of the name, as tf_efficientnet_b0 and efficientnet_b0."""
    rest = architecture.partition("_")[2]
    ends = (architecture, f"_{rest}") if "_" in rest else (architecture,)
    others = [name for name in import_timm().list_models() if f"_{name}".endswith(ends) and name != architecture]
    return [architecture, *others]


def _fits(weights: Mapping[str, Tensor], architecture: str) -> bool:
    """Whether the names and shapes of the tensors are those of an architecture, without its last layer."""
    try:
        with torch.device("meta"):
            state = import_timm().create_model(architecture).state_dict()
    except RuntimeError:  # timm cannot build every architecture on the meta device with every torch
        return False
    return not _misfits(_without_last_layer(weights, architecture), _without_last_layer(state, architecture))
