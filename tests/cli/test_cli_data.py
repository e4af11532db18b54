import gzip
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from sandmask.cli.data import app
from sandmask.datasets import DATASETS, sources
from sandmask.datasets.sources import RemoteFile, Source
from sandmask.errors import SandmaskError

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


def pacs_archive(each: int = 2) -> bytes:
    """A PACS of the right layout with a few images."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for i, (domain, kind) in enumerate((domain, kind) for domain in DOMAINS for kind in CLASSES):
            for number in range(each):
                image = io.BytesIO()
                Image.fromarray(np.full((8, 8, 3), i * 7 + number, np.uint8)).save(image, "PNG")
                file.writestr(f"kfold/{domain}/{kind}/{number}.png", image.getvalue())
    return packed.getvalue()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Quiet."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a web server, and the folder that it serves."""
    folder = tmp_path / "site"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", folder
        server.shutdown()
        thread.join()


@pytest.fixture
def small_pacs(site: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """PACS in miniature, published on the local server; the archive's path."""
    address, folder = site
    real = sources.SOURCES["PACS"]
    files = (RemoteFile("PACS.zip", (f"{address}/gone.zip", f"{address}/PACS.zip")),)
    counts = dict.fromkeys(DOMAINS, 14)
    small = Source("PACS", "PACS", ("PACS",), files, real.prepare, real.images, counts)
    monkeypatch.setitem(sources.SOURCES._entries, "pacs", small)
    (folder / "PACS.zip").write_bytes(pacs_archive())
    return folder / "PACS.zip"


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout


def test_list(tmp_path: Path) -> None:
    listed = json.loads(run("list", "--data-dir", tmp_path, "--json"))
    assert listed["data_dir"] == str(tmp_path)
    assert [row["name"] for row in listed["datasets"]] == list(DATASETS)
    rows = {row["name"]: row for row in listed["datasets"]}
    assert rows["Spirals"]["generated"]
    assert rows["PACS"]["images"] == 9991
    assert rows["PACS"]["path"] is None
    assert rows["PACS"]["expected_at"] == str(tmp_path / "PACS")
    text = run("list", "--data-dir", tmp_path)
    assert all(name in text for name in DATASETS)
    assert "art" not in text  # columns are those of the tables


def test_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("where", "--data-dir", tmp_path).strip() == str(tmp_path)
    monkeypatch.setenv("SANDMASK_DATA", str(tmp_path / "sets"))
    assert json.loads(run("where", "--json")) == {"data_dir": str(tmp_path / "sets")}
    assert run("where", "pacs").strip() == f"{tmp_path / 'sets' / 'PACS'} (does not exist yet)"
    (tmp_path / "sets" / "PACS").mkdir(parents=True)
    assert run("where", "pacs").strip() == str(tmp_path / "sets" / "PACS")
    found = json.loads(run("where", "PACS", "--json"))
    assert found == {"name": "PACS", "path": str(tmp_path / "sets" / "PACS"), "expected_at": found["path"]}
    with pytest.raises(SandmaskError, match="generated"):
        run("where", "Spirals")


def test_download_and_verify(small_pacs: Path, tmp_path: Path) -> None:
    text = run("download", "pacs", "--data-dir", tmp_path / "sets")
    assert "PACS: ok (art_painting 14, cartoon 14, photo 14, sketch 14)" in text
    assert "PACS.zip" in text
    assert run("verify", "--data-dir", tmp_path / "sets").startswith("PACS: ok")
    results = json.loads(run("verify", "PACS", "--contents", "--data-dir", tmp_path / "sets", "--json"))
    assert results[0]["status"] == "ok"
    assert results[0]["counts"]["photo"] == 14
    with pytest.raises(SandmaskError, match="already in"):
        run("download", "PACS", "--data-dir", tmp_path / "sets")
    run("download", "PACS", "--replace", "--keep-archives", "--data-dir", tmp_path / "sets")
    assert (tmp_path / "sets" / "downloads" / "PACS.zip").read_bytes() == small_pacs.read_bytes()


def test_verify_fails_with_status_1(small_pacs: Path, tmp_path: Path) -> None:
    run("download", "PACS", "--data-dir", tmp_path)
    (tmp_path / "PACS" / "photo" / "dog" / "0.png").unlink()
    text = run("verify", "--data-dir", tmp_path, status=1)
    assert "PACS: wrong" in text
    assert "photo has 13 images, and PACS has 14 there" in text
    results = json.loads(run("verify", "PACS", "--data-dir", tmp_path, "--json", status=1))
    assert results[0]["status"] == "wrong"


def test_a_download_that_is_not_complete_fails_with_status_1(small_pacs: Path, tmp_path: Path) -> None:
    small_pacs.write_bytes(pacs_archive(each=1))
    text = run("download", "PACS", "--data-dir", tmp_path, status=1)
    assert "PACS: wrong" in text


def test_verify_of_nothing(tmp_path: Path) -> None:
    assert run("verify", "--data-dir", tmp_path).strip() == f"There are no datasets in {tmp_path}."
    assert json.loads(run("verify", "--data-dir", tmp_path, "--json")) == []
    text = run("verify", "PACS", "--data-dir", tmp_path, status=1)
    assert text.startswith("PACS: missing")


def test_verify_mnist(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    for file in sources.SOURCES["MNIST"].files:
        (tmp_path / "mnist" / file.name).write_bytes(gzip.compress(b"something else"))
    text = run("verify", "ColoredMNIST", "--data-dir", tmp_path, status=1)
    assert "train-images-idx3-ubyte.gz does not hold the published MNIST data" in text


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match="Did you mean 'PACS'"):
        run("download", "PCAS", "--data-dir", tmp_path)
    with pytest.raises(SandmaskError, match="There is nothing to download"):
        run("download", "Spirals", "--data-dir", tmp_path)
    with pytest.raises(SandmaskError, match="Did you mean 'VLCS'"):
        run("verify", "VLC", "--data-dir", tmp_path)
