"""Freed memory: that the next step finds it again, in a process of its own, since the setting is the process's."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from sandmask.training.malloc import freed_memory_kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(16):
        torch.ones(2**24)  # 64 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
with freed_memory_kept() as could:
    kept = faults()
print(int(could), given_back, kept, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of the C library of Linux")
def test_memory_that_is_freed_is_not_mapped_again_for_as_long_as_that_is_wanted() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    could, given_back, kept, again = map(int, ran.stdout.split())
    assert could
    # The heap grows at the first block, and may at the second: what follows the first decides whether it fits again.
    assert kept < given_back / 4, (given_back, kept)
    assert again > given_back / 2, (given_back, again)
