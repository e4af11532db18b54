"""Fetch a file from Google Drive: gdown knows its ways."""

import inspect
from pathlib import Path
from typing import Any

from sandmask.datasets.download._http import MirrorError, Progress

ADDRESS = "https://drive.google.com/uc?id={id}"


def fetch_from_drive(file_id: str, part: Path, progress: Progress, address: str = ADDRESS) -> None:
    """Download to `part`, which appears when it is whole; gdown resumes from a file of its own beside it."""
    try:
        import gdown
        from gdown import exceptions
    except ImportError as error:
        raise MirrorError("this needs gdown: install sandmask[vision]") from error
    options: dict[str, Any] = {}
    if "progress" in inspect.signature(gdown.download).parameters:  # newer versions
        options["progress"] = progress
    refusals = getattr(exceptions, "DownloadError", exceptions.FileURLRetrievalError)
    try:
        done = gdown.download(
            address.format(id=file_id), str(part), quiet=True, resume=True, use_cookies=False, **options
        )
    except (OSError, refusals) as error:
        raise MirrorError(" ".join(str(error).split())) from error
    if done is None or not part.is_file():
        raise MirrorError("Google Drive did not hand out the file")
