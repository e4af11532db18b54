"""Generated folders of images, and a web server that misbehaves on demand."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write root/domain/class/N.png with random pixels; another picture for every file."""

    def make(
        domains: Sequence[str] = ("art", "photo"),
        classes: Sequence[str] = ("cat", "dog"),
        each: int = 3,
        size: tuple[int, int] = (40, 30),
        suffix: str = ".png",
        root: Path | None = None,
    ) -> Path:
        root = root or tmp_path / "images"
        draws = np.random.RandomState(0)
        for domain in domains:
            for name in classes:
                folder = root / domain / name
                folder.mkdir(parents=True, exist_ok=True)
                for number in range(each):
                    coarse = draws.randint(0, 256, (5, 5, 3)).astype(np.uint8)
                    Image.fromarray(coarse).resize(size).save(folder / f"{number}{suffix}")
        return root

    return make


@dataclass
class Page:
    """What the server answers at one address."""

    content: bytes
    ranges: bool = True  # whether it honours Range
    version: str | None = "v1"  # sent as ETag
    cuts: list[int] = field(default_factory=list)  # bytes after which the next connections are cut
    errors: list[int] = field(default_factory=list)  # statuses that the next requests get
    length: bool = True  # whether it says how long the content is


class FlakyServer(ThreadingHTTPServer):
    """Serves `pages`, and remembers the requests: (path, Range header)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages: dict[str, Page] = {}
        self.requests: list[tuple[str, str | None]] = []

    def serve(self, name: str, content: bytes, **how: object) -> str:
        """Put a page up; its address."""
        self.pages[f"/{name}"] = Page(content, **how)  # type: ignore[arg-type]
        return self.address(name)

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class _Handler(BaseHTTPRequestHandler):
    server: FlakyServer

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        wanted = self.headers.get("Range")
        self.server.requests.append((path, wanted))
        page = self.server.pages.get(path)
        if page is None or page.errors:
            self.send_error(404 if page is None else page.errors.pop(0))
            return
        start = 0
        if wanted and page.ranges and self.headers.get("If-Range", page.version) == page.version:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(page.content):
                self.send_error(416)
                return
        body = page.content[start:]
        self.send_response(206 if start else 200)
        if page.length:
            self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(page.content) - 1}/{len(page.content)}")
        if page.version:
            self.send_header("ETag", page.version)
        self.end_headers()
        self.wfile.write(body[: page.cuts.pop(0)] if page.cuts else body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        """Quiet."""


@pytest.fixture
def server() -> Iterator[FlakyServer]:
    """A server of this machine for one test."""
    with FlakyServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()
