"""Ranks of values, ties sharing the mean of theirs.

scipy.stats has the same function, but its import takes longer than a command may take to answer.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def rankdata(values: ArrayLike) -> NDArray[np.float64]:
    """Ranks [N] from 1 of ``values`` [N]; equal values get the mean of the ranks they take up.

    Raises ``ValueError`` for values that are not finite, which have no place in an order.
    """
    given = np.asarray(values, dtype=np.float64)
    if not np.isfinite(given).all():
        raise ValueError("values to rank must be finite")
    _, group, sizes = np.unique(given, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    mean: NDArray[np.float64] = last - (sizes - 1) / 2
    return mean[group]
