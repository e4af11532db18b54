"""Seeds derived from names: the same everywhere, and different for every name."""

import hashlib

import numpy as np


def seed_hash(*args: object) -> int:
    """A seed in 0 .. 2^31 - 1 from any values: the md5 of their printed tuple, as in DomainBed.

    NumPy scalars count as the Python numbers they stand for, so a seed taken from an array is the same.
    """
    plain = tuple(arg.item() if isinstance(arg, np.generic) else arg for arg in args)
    digest = hashlib.md5(str(plain).encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % 2**31
