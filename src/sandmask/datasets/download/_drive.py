"""Fetch a file from Google Drive, through gdown."""

from pathlib import Path

from sandmask.datasets.download._http import MirrorError, Progress

ADDRESS = "https://drive.google.com/uc?id={id}"


def fetch_from_drive(file_id: str, part: Path, progress: Progress, address: str = ADDRESS) -> None:
    """Download to `part`, which appears when it is whole; gdown resumes from a file of its own beside it."""
    try:
        import gdown
        from gdown.exceptions import DownloadError
    except ImportError as error:
        raise MirrorError("this needs gdown: install sandmask[vision]") from error
    try:
        url = address.format(id=file_id)
        done = gdown.download(url, str(part), quiet=True, resume=True, use_cookies=False, progress=progress)
    except (OSError, DownloadError) as error:
        raise MirrorError(" ".join(str(error).split())) from error
    if done is None or not part.is_file():
        raise MirrorError("Google Drive did not hand out the file")
