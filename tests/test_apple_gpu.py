"""Devices without float64, such as Apple's GPUs: an emulation computes what the CPU computes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch cannot emulate a device",
)
def test_a_device_without_float64_computes_what_the_cpu_computes() -> None:
    program = Path(__file__).with_name("emulated_device.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    distances = json.loads(done.stdout.splitlines()[-1])
    assert len(distances) == 12
    assert max(distances.values()) < 1e-5, distances
