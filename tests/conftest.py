"""Tests run side by side, one process a core: each computes with one thread, and so do the processes it starts."""

import os
import signal

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell's background jobs ignore interrupts, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Whatever a shell or a CI service says of colours, widths and proxies: output is plain, servers are on this machine.
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS", "LINES"):
    os.environ.pop(name, None)
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
# How long an example takes says more about the machine's load than about the code.
settings.register_profile("sandmask", deadline=None)
settings.load_profile("sandmask")
