"""Weights from a file: reading it, fitting what it holds to a timm model, and recognizing which model it is for."""

import json
import pickle
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sandmask.errors import SandmaskError
from sandmask.networks._timm import import_timm, pretrained_cfg

_WRAPPERS = ("state_dict", "model_state_dict", "model", "teacher", "params")
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "featurizer.")
_NOT_NEEDED = "num_batches_tracked"  # counts the steps of moving averages, which are constants here
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
    """By the content, as files get renamed: the length of a header in 8 bytes, and then JSON."""
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
    except Exception as error:  # of any type, if the file is not what it should be
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SandmaskError(f"{path} cannot be read as a PyTorch file: {reason}. Fetch the file again.") from error


def _strip_prefixes(tensors: StateDict) -> StateDict:
    stripped = True
    while stripped:
        stripped = False
        for prefix in _PREFIXES:
            if all(name.startswith(prefix) for name in tensors):
                tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
                stripped = True
    return tensors


def _full_precision(value: Tensor, name: str, path: Path) -> Tensor:
    """A tensor as float32, or as it is if it holds integers; an error if it is neither, or holds NaN or inf."""
    unusual = value.layout is not torch.strided or value.is_quantized or value.is_complex() or value.is_meta
    if unusual:
        raise SandmaskError(f"{path}: the tensor {name} is sparse, quantized, complex or empty. Give a file of floats.")
    if not value.is_floating_point():
        return value
    value = value.float()
    if not value.isfinite().all():
        raise SandmaskError(f"{path}: the tensor {name} contains NaN or inf. Give another file.")
    return value


def fit_weights(weights: Mapping[str, Tensor], model: nn.Module, name: str, source: str) -> StateDict:
    """The part of a state dict that fits a model without its last layer; an error if something is missing.

    The file's last layer is dropped, the first convolution is adapted to the number of input channels (as
    timm does: summed for one channel, otherwise repeated and scaled to the same sum), and position embeddings
    to the image size.
    """
    cfg = pretrained_cfg(name)
    wanted = model.state_dict()
    fitted = _adapt(dict(weights), wanted, cfg, source)
    if _misfits(fitted, wanted):
        converted = _convert(dict(weights), model)
        if converted is not None:
            fitted = _adapt(converted, wanted, cfg, source)
    misfits = _misfits(fitted, wanted)
    if misfits:
        raise SandmaskError(f"{source} does not fit the network {name!r}: {misfits}.{_advice(weights, name, source)}")
    _warn_of_twin(weights, name, source)
    return fitted


def _convert(weights: StateDict, model: nn.Module) -> StateDict | None:
    """The weights by the converter that timm has for some families: from other names and image sizes."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return None
    try:
        return dict(convert(weights, model))
    except _CONVERSION_ERRORS:
        return None  # weights of another family: the caller's message says so


def _adapt(weights: StateDict, wanted: StateDict, cfg: Mapping[str, Any], source: str) -> StateDict:
    """Without the last layer; with the first convolution for the model's number of input channels."""
    from timm.models import adapt_input_conv

    last = tuple(f"{layer}." for layer in _names(cfg.get("classifier")))
    weights = {k: v for k, v in weights.items() if not k.startswith(last)}
    for key in (f"{layer}.weight" for layer in _names(cfg.get("first_conv"))):
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


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if not value else (value,) if isinstance(value, str) else tuple(value)


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


def _some(items: list[str], kind: str, shown: int = 3) -> str:
    more = ", ..." if len(items) > shown else ""
    return f"{len(items)} tensor{'s' * (len(items) > 1)} {kind} ({', '.join(items[:shown])}{more})"


def _advice(weights: Mapping[str, Tensor], name: str, source: str) -> str:
    found = recognize(weights, source)
    if found is None or name.partition(".")[0] in found.fitting:
        return " Give a file for this network, or --weights none."
    return f" {found.advice}"


def _warn_of_twin(weights: Mapping[str, Tensor], name: str, source: str) -> None:
    """Say so where a file fits, but is called after another architecture that it fits as well."""
    other = called_after_another(weights, source, name)
    if other is not None:
        warnings.warn(
            f"{source} is named after the network {other!r} and was loaded into {name!r}. Their tensors have the same "
            f"shapes, but padding or normalization differ: if it was trained as {other!r}, choose --network {other}.",
            stacklevel=2,
        )


# Tried in this order when a file's name says nothing.
_COMMON = (
    "resnet50", "resnet18", "resnet34", "resnet101", "resnet152", "resnext50_32x4d", "wide_resnet50_2",
    "vit_small_patch16_224", "vit_base_patch16_224", "vit_base_patch32_224", "vit_large_patch16_224",
    "vit_small_patch14_dinov2", "vit_base_patch14_dinov2", "vit_large_patch14_dinov2",
    "efficientnet_b0", "efficientnet_lite0", "mobilenetv3_large_100", "convnext_tiny", "convnext_base",
    "swin_tiny_patch4_window7_224", "densenet121", "regnety_016",
)  # fmt: skip
_FOLDERS = 4  # folders above a file that may bear its model's name: a hub's cache has its files that deep


@dataclass(frozen=True)
class Recognized:
    """The architectures whose tensors have the names and shapes of a file's; `named` is the one it is called after."""

    fitting: tuple[str, ...]
    named: str | None

    @property
    def advice(self) -> str:
        """Advice, as a sentence."""
        if self.named is None and len(self.fitting) > 1:
            names = ", ".join(map(repr, self.fitting))
            return (
                f"It fits the networks {names}. Their tensors have the same shapes, but they compute differently "
                "(padding, normalization): choose the one that the file was trained as with --network."
            )
        best = self.named or self.fitting[0]
        others = ", ".join(repr(name) for name in self.fitting if name != best)
        same = f" (Tensors of the same shapes, but other padding or normalization: {others}.)" if others else ""
        return f"It looks like weights for {best!r}: choose --network {best}, or another file.{same}"


def recognize(weights: Mapping[str, Tensor], source: str) -> Recognized | None:
    """The architectures that a state dict fits, if they are named by its file or common."""
    named = _named_by(source)
    for candidate in (*named, *_COMMON):
        if import_timm().is_model(candidate) and _fits(weights, candidate):
            fitting = tuple(name for name in _alike(candidate) if name == candidate or _fits(weights, name))
            return Recognized(fitting, candidate if candidate in named else None)
    return None


def called_after_another(weights: Mapping[str, Tensor], source: str, network: str) -> str | None:
    """The architecture that a file is called after, if that is not `network` and the weights fit it, too."""
    own = network.partition(".")[0]
    named = _named_by(source)
    if not named or named[0] == own or named[0] not in _alike(own) or not _fits(weights, named[0]):
        return None
    return named[0]


def _named_by(source: str) -> list[str]:
    """Architectures in a file's description, its name or its folders' names: the best first, the longest name first."""
    models = import_timm().list_models() if Path(source).is_file() else []
    found: dict[str, None] = {}
    for hint in _hints(Path(source)):
        spelled = re.sub(r"[^a-z0-9]+", "_", hint.lower())
        words = f"_{spelled}_"
        # A digit goes on a number, so resnet50 is not in resnet501; letters may follow directly.
        inside = [name for name in models if re.search(rf"_{re.escape(name)}(?![0-9])", words)]
        found.update(dict.fromkeys(sorted(inside, key=len, reverse=True)))
    return list(found)


def _hints(path: Path) -> Iterator[str]:
    with suppress(OSError, ValueError, AttributeError):  # what timm's models on the hub have beside them
        yield str(json.loads((path.parent / "config.json").read_text(encoding="utf-8")).get("architecture", ""))
    if path.suffix == ".safetensors":
        yield from _metadata(path)
    yield path.stem
    yield from (folder.name for folder in list(path.parents)[:_FOLDERS])


def _metadata(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return [str(value) for value in (file.metadata() or {}).values()]
    except (OSError, SafetensorError):
        return []


def _alike(architecture: str) -> list[str]:
    """The architecture, then those whose names end in the same way, such as tf_efficientnet_b0 and efficientnet_b0."""
    rest = architecture.partition("_")[2]
    ends = (architecture, f"_{rest}") if "_" in rest else (architecture,)
    others = [name for name in import_timm().list_models() if f"_{name}".endswith(ends) and name != architecture]
    return [architecture, *others]


def _fits(weights: Mapping[str, Tensor], architecture: str) -> bool:
    try:
        body, last = _tensors(architecture)
    except RuntimeError:  # timm cannot build every architecture on the meta device with every torch
        return False
    return _shapes(weights, last) == body


def _tensors(architecture: str) -> tuple[dict[str, torch.Size], tuple[str, ...]]:
    """Shapes of an architecture's tensors by name, without its last layer's; the prefixes of that one's."""
    last = tuple(f"{layer}." for layer in _names(pretrained_cfg(architecture).get("classifier")))
    with torch.device("meta"):
        state = import_timm().create_model(architecture).state_dict()
    return _shapes(state, last), last


def _shapes(state: Mapping[str, Tensor], left_out: tuple[str, ...]) -> dict[str, torch.Size]:
    counted = {name: value.shape for name, value in state.items() if not name.endswith("num_batches_tracked")}
    return {name: shape for name, shape in counted.items() if not name.startswith(left_out)}
