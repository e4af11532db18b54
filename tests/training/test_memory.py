"""Freed memory: that the next step finds it again, in a process of its own, since the setting is the process's."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from sandmask.training.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back = faults()
could = keep_freed_memory()
faults()
print(int(could), given_back, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of the C library of Linux")
def test_memory_that_is_freed_is_not_mapped_again() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    could, given_back, kept = map(int, ran.stdout.split())
    assert could
    assert kept < given_back / 4, (given_back, kept)
