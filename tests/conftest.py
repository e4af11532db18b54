"""Tests run side by side, one process a core: each computes with one thread, and so do the processes it starts."""

import os
import signal

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell's background jobs ignore interrupts, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says more about the machine's load than about the code.
settings.register_profile("sandmask", deadline=None)
settings.load_profile("sandmask")
