"""Download datasets. Archives are checked, unpacked safely and prepared before a dataset appears in its folder."""

from sandmask.datasets.download._extract import ArchiveError, extract
from sandmask.datasets.download._http import MirrorError, Patience, Progress, fetch
from sandmask.datasets.download._install import Installed, install
from sandmask.datasets.download._verify import Ledger, Verification, verify, verify_own

__all__ = [
    "ArchiveError",
    "Installed",
    "Ledger",
    "MirrorError",
    "Patience",
    "Progress",
    "Verification",
    "extract",
    "fetch",
    "install",
    "verify",
    "verify_own",
]
