"""Tests run side by side, one process a core: each computes with one thread, and so do the processes it starts."""

import gc
import importlib.util
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell's background jobs ignore interrupts, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Whatever a shell or a CI service says of colours, widths and proxies: output is plain, servers are on this machine.
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS", "LINES"):
    os.environ.pop(name, None)
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
# What processes that are forked from a server need not import again.
multiprocessing.set_forkserver_preload(["pytest", "sandmask.api", "sandmask.cli", "torch.distributed.fsdp"])
# How long an example takes says more about the machine's load than about the code.
settings.register_profile("sandmask", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sandmask")

# What a skipped test lacks, by words of its reason, and how to run it.
_REMEDIES = {
    "Chromium": ("browser", "install Chromium (Debian: chromium), or name it in CHROMIUM"),
    "SANDMASK_TEST_DATA": ("real data", "set SANDMASK_TEST_DATA to a folder with mnist/, pacs_webp70.zip and weights/"),
    "CUDA": ("CUDA", "run on a machine with an NVIDIA GPU"),
    "Slurm": ("Slurm", "install Slurm (Debian: slurm-wlm and munge)"),
}


@pytest.fixture(scope="session")
def start_program() -> Callable[..., BaseProcess]:
    """Start `sandmask` in a process of its own; see `forked.start`."""
    start: Callable[..., BaseProcess] = importlib.import_module("forked").start
    return start


def skip_summary(reasons: Iterable[str]) -> list[str]:
    """One line for each kind of skipped tests: how many, and what to do."""
    kinds = Counter(next((word for word in _REMEDIES if word in reason), "") for reason in reasons)
    lines = [f"  {kind}: {kinds[word]} skipped; {remedy}" for word, (kind, remedy) in _REMEDIES.items() if kinds[word]]
    return [*lines, f"  other: {kinds['']} skipped; reasons above"] if kinds[""] else lines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of the guest, `sandmask.paper`, where it was left out."""
    if importlib.util.find_spec("sandmask.paper") is None:
        for item in items:
            if item.get_closest_marker("paper"):
                item.add_marker(pytest.mark.skip(reason="sandmask.paper is not installed"))


def pytest_collection_finish() -> None:
    """Leave out what the imported modules keep, half a million objects, from every garbage collection of the tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """After everything else, say what was not tested here."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    lines = skip_summary(report.longrepr[2] if isinstance(report.longrepr, tuple) else "" for report in skipped)
    if lines:
        terminalreporter.write_line("Not tested on this machine:")
        for line in lines:
            terminalreporter.write_line(line)
