"""The GPU kernel against its twin: on a GPU, and anywhere through Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from sandmask.masks import ANDMask, GradientMoments, Mask, SANDMask

MASKS = [ANDMask(tau=1.0), ANDMask(tau=1 / 3), SANDMask(tau=0.3), SANDMask(tau=0.1, dispersion="absolute", gain=0.5)]

INTERPRETED = """
import numpy as np
import torch
from sandmask.masks import ANDMask, GradientMoments, SANDMask, _triton
torch.manual_seed(0)
for count in (2, 3, 16):
    grads = torch.randn(count, 5, 70)
    grads[:, 0] = grads[0, 0]
    grads[:, 1] = 0
    grads[:, 2] *= 1e-12
    released = SANDMask(np.float32(0.1), dispersion="absolute", gain=np.float32(0.5))
    for mask in (ANDMask(1), ANDMask(1 / 3), SANDMask(0.3), released):
        twin = mask.from_moments(GradientMoments.of_gradients(grads))
        torch.testing.assert_close(_triton.masked_mean(mask, grads), twin, rtol=1e-4, atol=1e-6)
        assert _triton.supports(mask, grads)

# Over 2^31 elements: 32 bits do not reach the last environments. Memory is used only where it is written.
count, row = 64, 2**25 + 2**20
far = torch.empty(count * row, dtype=torch.int8).view(count, row)
far[:, :1024] = torch.arange(count, dtype=torch.int8).unsqueeze(1)
found = torch.empty(3, 1024)
_triton._moments_kernel[(1,)](far, *found, 1024, row, count=count, unit=1, block=1024)
numbers = torch.arange(64.0)
expected = torch.stack([numbers.sign().sum(), numbers.mean(), 63 * numbers.var()])
torch.testing.assert_close(found, expected.unsqueeze(1).expand_as(found))
print("agreed")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is there on Linux only")
def test_interpreted_kernel_agrees_with_the_moments() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "agreed", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 16])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_kernel_agrees_with_the_moments(mask: Mask, count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grads = torch.randn(count, 1031, 33, device="cuda", dtype=dtype)
    grads[:, 0] = grads[0, 0]
    grads[:, 1] = 0
    twin = mask.from_moments(GradientMoments.of_gradients(grads))
    torch.testing.assert_close(mask(grads), twin, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)
