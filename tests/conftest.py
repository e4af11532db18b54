"""Tests run side by side, one process a core: each computes with one thread, and so do the processes it starts."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
