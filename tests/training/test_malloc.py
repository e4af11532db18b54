"""Freed memory: that the next step finds it again, in a process of its own, since the setting is the process's."""

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes
import resource
import torch
from sandmask.training.malloc import freed_memory_kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(16):
        torch.ones(2**24)  # 64 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

class Info(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info

def is_mapped(gigabytes):
    block = torch.empty(gigabytes * 2**28)  # never touched, and larger than anything that is free
    return int(mallinfo().hblkhd >= gigabytes * 2**30)

given_back = faults()
with freed_memory_kept() as could:
    kept = faults()
    inside = is_mapped(1)
print(int(could), given_back, kept, inside, is_mapped(3))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of the C library of Linux")
def test_memory_that_is_freed_is_not_mapped_again_for_as_long_as_that_is_wanted() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    could, given_back, kept, mapped_inside, mapped_after = map(int, ran.stdout.split())
    assert could
    # The heap grows at the first block, and may at the second: what follows the first decides whether it fits again.
    assert kept < given_back / 4, (given_back, kept)
    assert (mapped_inside, mapped_after) == (0, 1)
