"""Mean and standard error, as DomainBed and the paper print them."""

from collections.abc import Sequence

import numpy as np


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of accuracies over trials and its standard error, both in percent.

    The error is the population standard deviation over sqrt(n). The order of operations is DomainBed's,
    because a value that lies between two printed digits is rounded by its last bit.
    """
    sample = np.asarray(values, dtype=np.float64)
    return float(100 * np.mean(sample)), float(100 * np.std(sample / np.sqrt(len(sample))))
