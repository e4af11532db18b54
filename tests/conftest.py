"""Tests run side by side, one process a core: each computes with one thread, and so do the processes it starts."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# How long an example takes says more about the machine's load than about the code.
settings.register_profile("sandmask", deadline=None)
settings.load_profile("sandmask")
