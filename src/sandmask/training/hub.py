"""Models in the layout of the Hugging Face Hub: `config.json`, `model.safetensors` and a model card, `README.md`."""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sandmask
from sandmask._files import replacing
from sandmask._online import hub_if_reachable
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, split_averages, write_record
from sandmask.training.folder import MODEL, RECORDS
from sandmask.training.model_card import ModelCard

if TYPE_CHECKING:
    from sandmask.training.trained_run import TrainedRun

PREFIX = "hf:"
CONFIG, CARD = "config.json", "README.md"
FILES = (CONFIG, MODEL, CARD, RECORDS)


def save_for_hub(
    run: "TrainedRun",
    folder: str | os.PathLike[str],
    *,
    runs: Sequence[RunRecord] = (),
    name: str | None = None,
) -> Path:
    """See `TrainedRun.save_pretrained`. The model card says to load the model by `name`, or else by the folder.

    The folder may exist if it holds only an earlier version of these files.
    """
    target = Path(folder)
    _check_target(target)
    record: RunRecord | None = None
    with suppress(SandmaskError):  # a model file may have been moved without its records
        record = run.record()
    rows = split_averages([record]) if record is not None else []
    own = next((row for row in rows if row.spec.options.get("average") == run.info.average), None)
    try:
        target.mkdir(parents=True, exist_ok=True)
        run.save_model(target / MODEL)
        if record is not None:
            write_record(record, target / RECORDS)
        _write(target / CONFIG, json.dumps(_config(run), indent=2) + "\n")
        _write(target / CARD, ModelCard(run, own, runs).text(name or str(target)))
    except OSError as error:
        raise SandmaskError(f"{error.filename or target} cannot be written ({error.strerror or error}).") from error
    return target


def push_to_hub(run: "TrainedRun", repository: str, *, runs: Sequence[RunRecord] = (), private: bool = False) -> str:
    """See `TrainedRun.push_to_hub`."""
    repository = repository.removeprefix(PREFIX)
    _check_name(repository)
    with _connected(f"{PREFIX}{repository}", "push") as hub, tempfile.TemporaryDirectory() as scratch:
        folder = save_for_hub(run, Path(scratch) / "model", runs=runs, name=f"{PREFIX}{repository}")
        api = hub.HfApi()
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"sandmask {sandmask.__version__}")
    return str(address)


def fetch(name: str) -> Path:
    """The local folder of the model `name`, "hf:" and the repository on the Hub. It is downloaded or in the cache."""
    repository = name.removeprefix(PREFIX)
    _check_name(repository)
    with _connected(name, "load", offline=True) as hub:
        return Path(hub.snapshot_download(repository, allow_patterns=list(FILES)))


def _config(run: "TrainedRun") -> dict[str, Any]:
    """The content of config.json. `load_run` does not read it, because the model file has the same content."""
    numbered = dict(enumerate(run.classes))
    return {
        "model_type": "sandmask",
        "library_name": "sandmask",
        "sandmask_version": sandmask.__version__,
        "architectures": [run.spec.network],
        "id2label": numbered,
        "label2id": {name: number for number, name in numbered.items()},
        **run.info.to_json(),
    }


def _check_target(folder: Path) -> None:
    """Raise an error if the folder holds other files, such as the folder of a run."""
    if folder.exists() and not folder.is_dir():
        raise SandmaskError(f"{folder} is a file. Name a folder to write the model to.")
    others = sorted(path.name for path in folder.iterdir() if path.name not in FILES) if folder.is_dir() else []
    if others:
        raise SandmaskError(f"{folder} holds other files, such as {others[0]}. Name a new or an empty folder.")
    if (folder / RECORDS).exists() and not (folder / CONFIG).exists():
        raise SandmaskError(f"{folder} is the folder of a run. Name a new or an empty folder.")


def _check_name(repository: str) -> None:
    if not re.fullmatch("[^/]+/[^/]+", repository):
        raise SandmaskError(f"A model on the Hub is named OWNER/NAME. Found {repository!r}.")


@contextmanager
def _connected(name: str, purpose: str, *, offline: bool = False) -> Iterator[Any]:
    """Yield the package `huggingface_hub`, and convert its errors to one line. `offline` allows only the cache."""
    if find_spec("huggingface_hub") is None:
        raise SandmaskError(f"{name} needs the package huggingface_hub: pip install 'sandmask[huggingface]'")
    import huggingface_hub

    with hub_if_reachable() as address:
        if address is None and not offline:
            raise SandmaskError(
                f"Cannot {purpose} {name}: huggingface.co cannot be reached. Write the files here with --hub DIR, and "
                "upload them from a connected machine: hf upload OWNER/NAME DIR"
            )
        try:
            yield huggingface_hub
        except (OSError, ValueError) as error:  # base classes of the errors of the package and its transport
            if isinstance(error, SandmaskError):
                raise
            reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
            if address is None:
                reason = "it is not in the cache of Hugging Face, and huggingface.co cannot be reached"
            hint = " Log in with: hf auth login" if "401" in reason or "403" in reason else ""
            raise SandmaskError(f"Cannot {purpose} {name}: {reason}.{hint}") from error


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
