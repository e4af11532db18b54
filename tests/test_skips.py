"""The end of a test run says what was skipped, and how to run it."""

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

@pytest.mark.parametrize("reason", ["needs a CUDA device", "no CUDA device", "needs Chromium: get it", "Windows only"])
def test_skipped(reason):
    pytest.skip(reason)
"""


def test_skipped_tests_are_counted_by_kind_with_what_to_do(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-5:-1] == [
        "Not tested on this machine:",
        "  browser: 1 skipped; install Chromium (Debian: chromium), or name it in CHROMIUM",
        "  CUDA: 2 skipped; run on a machine with an NVIDIA GPU",
        "  other: 1 skipped; reasons above",
    ]
