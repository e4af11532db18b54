"""timm's own pretrained weights: from its cache, or downloaded; a quick, plain error where neither works."""

from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from sandmask._online import answers
from sandmask.errors import SandmaskError
from sandmask.networks._timm import create, pretrained_cfg
from sandmask.networks.weights import StateDict

_FILES = ("model.safetensors", "pytorch_model.bin")  # what timm looks for, in its order
_REMEDIES = "Give a local file with --weights FILE (.safetensors or .pth), or train from scratch with --weights none."


def pretrained_weights(name: str, input_shape: tuple[int, ...]) -> StateDict:
    """The state dict of timm's pretrained model for images of this size, with three input channels."""
    cfg = pretrained_cfg(name)
    host = _source(cfg)
    if host is None:
        raise SandmaskError(f"timm has no pretrained weights for the network {name!r}. {_REMEDIES}")
    if not _is_cached(cfg) and not answers(host):
        raise SandmaskError(
            f"The pretrained weights of {name!r} are not on this machine, and {host} cannot be reached. " + _REMEDIES
        )
    try:
        model = create(name, (3, *input_shape[1:]), pretrained=True)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SandmaskError(f"The pretrained weights of {name!r} could not be loaded: {reason} {_REMEDIES}") from error
    return dict(model.state_dict())


def _source(cfg: dict[str, Any]) -> str | None:
    """The address that timm would download from."""
    if cfg.get("hf_hub_id"):
        from huggingface_hub import constants

        return str(constants.ENDPOINT)
    return str(cfg["url"]) if cfg.get("url") else None


def _is_cached(cfg: dict[str, Any]) -> bool:
    if not cfg.get("hf_hub_id"):
        from torch.hub import get_dir

        return (Path(get_dir()) / "checkpoints" / Path(urlparse(cfg["url"]).path).name).is_file()
    from huggingface_hub import try_to_load_from_cache

    repo, _, revision = str(cfg["hf_hub_id"]).partition("@")
    files = (cfg["hf_hub_filename"],) if cfg.get("hf_hub_filename") else _FILES
    found = (try_to_load_from_cache(repo, file, revision=revision or None) for file in files)
    return any(isinstance(path, str) for path in found)
