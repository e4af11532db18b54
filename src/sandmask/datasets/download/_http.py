"""Download a file over HTTP or from Google Drive. Broken connections are resumed."""

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sandmask._files import replacing
from sandmask._version import __version__
from sandmask.errors import SandmaskError

Progress = Callable[[int, int | None], None]  # (bytes so far, total bytes if known)

CHUNK = 1 << 20
WORTH_ANOTHER_TRY = (408, 425, 429, 500, 502, 503, 504)
MOST_TRIES = 100  # even if they make progress
DRIVE_ADDRESS = "https://drive.google.com/uc?id={id}"


class MirrorError(Exception):
    """A mirror failed. The message has the reason."""


class _InterruptedError(Exception):
    """The connection broke or the server has a temporary problem, so that another attempt may succeed."""


@dataclass(frozen=True)
class Patience:
    """The retries and timeouts of a download."""

    tries: int = 4  # consecutive attempts without progress
    wait: float = 1.0  # seconds before the next attempt, doubled each time
    timeout: float = 30.0  # seconds to wait for a reply


@dataclass(frozen=True)
class _Origin:
    """The origin of a partial file, stored beside it."""

    url: str
    version: str | None = None  # identifies the version of the file on the server: ETag or date
    total: int | None = None


def fetch(url: str, part: Path, progress: Progress, patience: Patience | None = None) -> None:
    """Download a file, and resume a partial download of the same file.

    :param url: http address.
    :param part: file to write to.
    :param progress: called with the bytes done and the total, if it is known.
    :param patience: retries and timeouts; the defaults if not given.
    """
    patience = patience or Patience()
    if not url.startswith(("http://", "https://")):
        raise MirrorError(f"{url} is not an http address")
    fruitless = 0
    for _ in range(MOST_TRIES):
        before = _size(part)
        try:
            _transfer(url, part, progress, patience.timeout)
        except _InterruptedError as error:
            fruitless = 0 if _size(part) > before else fruitless + 1
            if fruitless >= patience.tries:
                raise MirrorError(str(error)) from error
            time.sleep(patience.wait * 2 ** max(0, fruitless - 1))
        else:
            _origin_file(part).unlink(missing_ok=True)
            return
    raise MirrorError(f"gave up after {MOST_TRIES} broken connections")


def discard(part: Path) -> None:
    """Remove a partial download."""
    part.unlink(missing_ok=True)
    _origin_file(part).unlink(missing_ok=True)


def _transfer(url: str, part: Path, progress: Progress, timeout: float) -> None:
    """Download as much as possible with one connection."""
    origin = _read_origin(part)
    if origin is None or origin.url != url:
        discard(part)
        origin = _Origin(url)
    offset = _size(part)
    if offset and origin.total == offset:
        return
    with _open(part, offset, origin, timeout) as response:
        start, origin = _reconcile(part, offset, origin, response)
        _write(part, start, response, origin.total, progress)
    if origin.total is not None and _size(part) != origin.total:
        raise _InterruptedError(f"the connection was cut after {_size(part):,} of {origin.total:,} bytes")


def _open(part: Path, offset: int, origin: _Origin, timeout: float) -> http.client.HTTPResponse:
    headers = {"User-Agent": f"sandmask/{__version__}", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if origin.version:
            headers["If-Range"] = origin.version
    request = urllib.request.Request(origin.url, headers=headers)  # noqa: S310 - `fetch` takes http and https only
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            discard(part)
            raise _InterruptedError("the server has a shorter file than before") from error
        if error.code in WORTH_ANOTHER_TRY:
            raise _InterruptedError(f"HTTP {error.code} {error.reason}") from error
        raise MirrorError(f"HTTP {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(str(getattr(error, "reason", error))) from error
    return response


def _reconcile(part: Path, offset: int, origin: _Origin, response: http.client.HTTPResponse) -> tuple[int, _Origin]:
    """Return the position in the file at which to write the reply (0 if it is the whole file), and the origin."""
    etag = response.headers.get("ETag", "")
    version = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
    length = response.headers.get("Content-Length")
    if response.status == http.HTTPStatus.PARTIAL_CONTENT:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        total = int(match[2]) if match and match[2] != "*" else None
        if not match or int(match[1]) != offset or (origin.total is not None and total != origin.total):
            discard(part)
            raise _InterruptedError("the file on the server has changed, or the answer is not the requested part")
        start = offset
    else:
        total = int(length) if length else None
        start = 0
    now = _Origin(origin.url, version, total)
    with replacing(_origin_file(part)) as temporary:
        temporary.write_text(json.dumps(asdict(now)), encoding="utf-8")
    return start, now


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise errors of the disk as an error that names the file, unlike errors of a server or an archive."""
    try:
        yield
    except OSError as error:
        raise SandmaskError(f"{path} cannot be written ({error.strerror}).") from error


def _write(part: Path, start: int, response: http.client.HTTPResponse, total: int | None, progress: Progress) -> None:
    done = start
    with writing(part):
        file = part.open("ab" if start else "wb")
    with file:
        progress(done, total)
        while True:
            try:
                chunk = response.read1(CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise _InterruptedError(f"the connection broke ({error})") from error
            if not chunk:
                return
            with writing(part):
                file.write(chunk)
            done += len(chunk)
            progress(done, total)


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _origin_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _read_origin(part: Path) -> _Origin | None:
    try:
        return _Origin(**json.loads(_origin_file(part).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def fetch_from_drive(file_id: str, part: Path, progress: Progress) -> None:
    """Download to `part`, which appears when it is complete. gdown resumes from its own file beside it."""
    try:
        import gdown
        from gdown.exceptions import DownloadError
    except ImportError as error:
        raise MirrorError("this needs gdown: install sandmask[vision]") from error
    try:
        url = DRIVE_ADDRESS.format(id=file_id)
        done = gdown.download(url, str(part), quiet=True, resume=True, use_cookies=False, progress=progress)
    except (OSError, DownloadError) as error:
        raise MirrorError(" ".join(str(error).split())) from error
    if done is None or not part.is_file():
        raise MirrorError("Google Drive did not provide the file")
