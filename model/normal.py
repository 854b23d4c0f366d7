"""The standard normal distribution on arrays, from the standard library.

scipy.special has the same functions, but its import takes longer than a command may take to answer.
"""

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

_erfc = np.frompyfunc(math.erfc, 1, 1)
_quantile = np.frompyfunc(NormalDist().inv_cdf, 1, 1)


def ndtr(z: ArrayLike) -> Array:
    """P(Z <= z), the shape of ``z``; exact to the last digits in both tails."""
    scaled = np.asarray(z, dtype=np.float64) * -math.sqrt(0.5)
    result: Array = 0.5 * _as_float(_erfc(scaled))
    return result


def ndtri(share: ArrayLike) -> Array:
    """z with P(Z <= z) = ``share``, its shape. Raises ``ValueError`` unless 0 < share < 1.

    Algorithm AS 241 (Wichura 1988), about 16 digits; equal shares are computed once.
    """
    values = np.asarray(share, dtype=np.float64)
    distinct, index = np.unique(values, return_inverse=True)
    return _as_float(_quantile(distinct))[index].reshape(values.shape)


def normal_pdf(z: ArrayLike) -> Array:
    """The density at ``z``, its shape."""
    squares = np.square(np.asarray(z, dtype=np.float64))
    result: Array = np.exp(-0.5 * squares) / math.sqrt(2 * math.pi)
    return result


def _as_float(values: Any) -> Array:
    # a ufunc made from a Python function gives objects, or a bare float for a scalar
    result: Array = np.asarray(values, dtype=np.float64)
    return result
