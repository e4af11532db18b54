"""The checks of the kernels for K runs: on a GPU here, else by Triton's interpreter in a process of their own."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = (
    "context_kernel_checks",
    "conv_kernel_checks",
    "edge_kernel_checks",
    "pooled_kernel_checks",
    "second_kernel_checks",
    "split_kernel_checks",
    "stack_kernel_checks",
    "tile_kernel_checks",
)

if torch.cuda.is_available():
    pytest.register_assert_rewrite(*CHECKS)
    for checks in (vars(importlib.import_module(name)) for name in CHECKS):
        globals().update({name: check for name, check in checks.items() if not name.startswith("__")})
else:

    def test_kernels_in_the_interpreter() -> None:
        pytest.importorskip("triton")
        paths = [str(Path(__file__).with_name(f"{name}.py")) for name in CHECKS]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when triton is imported
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
