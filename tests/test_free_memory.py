from pathlib import Path

import pytest
import torch

from sandmask import _memory
from sandmask._memory import free_memory
from sandmask.datasets._store import place_cache
from sandmask.sweeps._cost import available_memory

GB = 2**30


def system(root: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str]) -> None:
    """A machine with 64 GB free, of which the process's control groups may allow less."""
    contents = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {64 * 2**20} kB\n", "proc/self/cgroup": group}
    for name, text in {**contents, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(_memory, "_PROC", root / "proc")
    monkeypatch.setattr(_memory, "_CGROUPS", root / "cgroup")


def test_it_is_a_plausible_number() -> None:
    free = free_memory()
    assert free is None or 2**20 < free < 2**50


def test_without_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"cgroup/memory.max": "max\n", "cgroup/memory.current": f"{GB}\n"}
    system(tmp_path, monkeypatch, "0::/\n", limits)
    assert free_memory() == 64 * GB


@pytest.mark.parametrize(("group", "limited"), [("/", "cgroup"), ("/job/step", "cgroup/job")])
def test_a_container_has_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, limited: str) -> None:
    limits = {
        f"{limited}/memory.max": f"{4 * GB}\n",
        f"{limited}/memory.current": f"{3 * GB}\n",
        f"{limited}/memory.stat": f"anon 1\ninactive_file {GB}\n",
    }
    system(tmp_path, monkeypatch, f"0::{group}\n", limits)
    assert free_memory() == 2 * GB
    assert available_memory(torch.device("cpu")) == 2 * GB
    assert place_cache("auto", int(1.5 * GB), torch.device("cpu")) == "none"
    assert place_cache("auto", GB, torch.device("cpu")) == "memory"


def test_control_groups_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"memory.limit_in_bytes": f"{3 * GB}\n", "memory.usage_in_bytes": f"{GB}\n"}
    group = "5:cpu,cpuacct:/a\n4:memory:/job\n"
    system(tmp_path, monkeypatch, group, {f"cgroup/memory/job/{name}": text for name, text in limits.items()})
    assert free_memory() == 2 * GB


def test_a_system_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(_memory, "_CGROUPS", tmp_path / "cgroup")
    assert free_memory() is None
    assert available_memory(torch.device("cpu")) == float("inf")
    assert place_cache("auto", GB, torch.device("cpu")) == "memory"
