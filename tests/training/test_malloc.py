"""Freed memory: that the next step finds it again, in a process of its own, since the setting is the process's."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from sandmask.training.malloc import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(16):
        torch.ones(2**24)  # 64 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
print(int(keep_freed_memory()), given_back, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of the C library of Linux")
def test_memory_that_is_freed_is_not_mapped_again() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    could, given_back, kept = map(int, ran.stdout.split())
    assert could
    # The heap grows at the first block, and may at the second: what follows the first decides whether it fits again.
    assert kept < given_back / 4, (given_back, kept)
