"""Quantiles of predicted times: log-normal, or a mixture of two where the host has two modes."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

Array = NDArray[Any]

#: a 90 % interval reaches this many standard deviations to each side
Z90 = 1.6448536269514722
QUANTILES = (0.05, 0.5, 0.95)
_STEPS = 18


def mixture_quantiles(
    log_fast: ArrayLike,
    sd_fast: ArrayLike,
    log_slow: ArrayLike,
    sd_slow: ArrayLike,
    slow_share: float,
) -> Array:
    """5 %, 50 % and 95 % quantiles, [3, N], of (1 - p) LogN(fast) + p LogN(slow).

    Where both modes agree (captured graphs) the closed form is used; elsewhere bisection.
    """
    mf, sf, ms, ss = np.broadcast_arrays(
        *(np.asarray(v, dtype=float) for v in (log_fast, sd_fast, log_slow, sd_slow))
    )
    z = ndtri(np.array(QUANTILES))[:, None]
    out = mf + z * sf
    rows = np.flatnonzero(np.abs(ms - mf) > 0.02 * np.maximum(sf, 1e-6))
    if rows.size and slow_share > 0:
        for q, level in enumerate(QUANTILES):
            ends = np.stack([mf[rows] + z[q] * sf[rows], ms[rows] + z[q] * ss[rows]])
            low, high = ends.min(axis=0), ends.max(axis=0)
            for _ in range(_STEPS):
                middle = 0.5 * (low + high)
                below = (1 - slow_share) * ndtr((middle - mf[rows]) / sf[rows])
                below = below + slow_share * ndtr((middle - ms[rows]) / ss[rows])
                high = np.where(below >= level, middle, high)
                low = np.where(below >= level, low, middle)
            out[q, rows] = 0.5 * (low + high)
    result: Array = np.exp(out)
    return result
