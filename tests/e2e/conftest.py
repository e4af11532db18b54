"""A made-up sweep's page, and a real browser to open it: headless Chromium, from the disk, without a network."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from sandmask.records import RunRecord
from sandmask.records.testing import made_up_sweep
from sandmask.reports.html import write_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LAYERS = ("all", "featurizer.layers.0.weight", "classifier.bias")


def with_diagnostics(run: RunRecord) -> RunRecord:
    count = len(run.steps)
    shares = np.linspace(0.9, 0.1, count)
    more = {f"{kind}/{layer}": shares for kind in ("mask_density", "dead_fraction") for layer in LAYERS}
    more |= {f"agreement/{layer}/{part}": np.full(count, part / 45) for layer in LAYERS for part in range(10)}
    return replace(run, metrics={**run.metrics, **more})


def sweep() -> list[RunRecord]:
    """PACS, with numbers in the paper, and a dataset whose names are hard to write down."""
    spread: dict[str, Any] = {"size": 300, "trials": 3, "checkpoints": 7}
    pacs = made_up_sweep(["ERM", "IRM", "ANDMask", "SANDMask"], environments=4, dataset="PACS", pairs=True, **spread)
    pacs = [replace(run, env_names=("A", "C", "P", "S")) for run in pacs]
    pacs = [with_diagnostics(run) if run.spec.algorithm == "SANDMask" else run for run in pacs]
    pacs[0] = replace(pacs[0], status="diverged", diverged_at=650)
    pacs[1] = replace(pacs[1], status="running")
    pacs = [run for run in pacs if (run.spec.algorithm, run.spec.test_envs) != ("ANDMask", (3,))]
    return pacs + made_up_sweep(["ERM", "A_50% | <b>&{x}~^"], dataset="<img src=x> -5 ±|", seed=1, **spread)


@pytest.fixture(scope="module")
def runs() -> list[RunRecord]:
    return sweep()


@pytest.fixture(scope="module")
def address(runs: list[RunRecord], tmp_path_factory: pytest.TempPathFactory) -> str:
    target = tmp_path_factory.mktemp("page") / "report.html"
    return write_html(runs, target, title="A sweep & more").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev extra")
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("needs Chromium: install it, or name it in CHROMIUM")
    with sync_api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser: "Browser", address: str) -> Iterator[Callable[..., "Page"]]:
    """Opens a view of the page; at the end, there must have been no message, no error and no request."""
    problems: list[str] = []
    opened = []

    def open_view(
        view: str = "", *, scheme: Literal["light", "dark"] = "light", width: int = 1200, target: str | None = None
    ) -> "Page":
        context = browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 844}, accept_downloads=True, offline=True
        )
        opened.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else problems.append(r.url))
        page.goto(f"{target or address}#/{view}")
        page.wait_for_selector("body[data-drawn]")
        return page

    yield open_view
    for context in opened:
        context.close()
    assert problems == []
