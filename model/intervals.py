"""Quantiles of predicted times: log-normal, or a mixture of two where the host has two modes."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.normal import ndtr as normal_ndtr
from model.normal import ndtri

Array = NDArray[Any]
Index = NDArray[np.intp]

#: a 90 % interval reaches this many standard deviations to each side
Z90 = 1.6448536269514722
QUANTILES = (0.05, 0.5, 0.95)
_BISECTIONS = 40
#: so many mixtures are computed one by one; more are looked up in a table
_FEW = 32
#: grid of the distance between the modes, in sd of the first, and of the ratio of the sds
_DISTANCE = np.sinh(np.linspace(-np.arcsinh(80.0), np.arcsinh(80.0), 401))
_RATIO = np.exp(np.linspace(np.log(0.25), np.log(4.0), 25))


def mixture_quantiles(
    log_fast: ArrayLike, sd_fast: ArrayLike, log_slow: ArrayLike, sd_slow: ArrayLike, share: float
) -> Array:
    """5 %, 50 % and 95 % quantiles, [3, N], of (1 - share) LogN(fast) + share LogN(slow).

    Interpolated in a table of the standardised mixture (error below 1 % of an sd but next to a
    jump from one mode to the other); exact where both modes agree, as in captured graphs.
    """
    mf, sf, ms, ss = np.broadcast_arrays(
        *(np.asarray(v, dtype=float) for v in (log_fast, sd_fast, log_slow, sd_slow))
    )
    safe = np.maximum(sf, 1e-9)
    distance, ratio = (ms - mf) / safe, np.clip(ss / safe, _RATIO[0], _RATIO[-1])
    mixed = np.flatnonzero(np.abs(distance) > 0.02)
    out = mf + ndtri(np.array(QUANTILES))[:, None] * sf
    if mixed.size and share > 0:
        standard = _lookup(distance[mixed], ratio[mixed], round(share, 6))
        out[:, mixed] = mf[mixed] + sf[mixed] * standard
    result: Array = np.exp(out)
    return result


def _lookup(distance_M: Array, ratio_M: Array, share: float) -> Array:
    """Bilinear interpolation; beyond the grid the far mode's share follows its distance."""
    last = _DISTANCE.size - 2
    i = np.clip(np.searchsorted(_DISTANCE, distance_M) - 1, 0, last)
    j = np.clip(np.searchsorted(_RATIO, ratio_M) - 1, 0, _RATIO.size - 2)
    u = (distance_M - _DISTANCE[i]) / (_DISTANCE[i + 1] - _DISTANCE[i])
    v = (ratio_M - _RATIO[j]) / (_RATIO[j + 1] - _RATIO[j])
    corners = _few if distance_M.size <= _FEW else _from_table
    near = corners(share, i, j) * (1 - v) + corners(share, i, j + 1) * v
    far = corners(share, i + 1, j) * (1 - v) + corners(share, i + 1, j + 1) * v
    result: Array = near + (far - near) * u
    return result


def _few(share: float, i: Index, j: Index) -> Array:
    """Grid points one by one: for a handful, cheaper than the table and the import for it."""
    return _quantiles(share, _DISTANCE[i], _RATIO[j], normal_ndtr)


def _from_table(share: float, i: Index, j: Index) -> Array:
    return _table(share)[:, i, j]


@lru_cache(maxsize=16)
def _table(share: float) -> Array:
    """Quantiles of (1 - share) N(0, 1) + share N(distance, ratio^2) on the grid, [3, D, R]."""
    # here, because only commands that predict many knobs are worth the import
    from scipy.special import ndtr

    return _quantiles(share, _DISTANCE[:, None], _RATIO[None, :], ndtr)


def _quantiles(
    share: float, distance: Array, ratio: Array, ndtr: Callable[[Array], Array]
) -> Array:
    """[3, ...] quantiles for distances and ratios that broadcast, by bisection."""
    out = np.empty((3, *np.broadcast_shapes(distance.shape, ratio.shape)))
    for q, level in enumerate(QUANTILES):
        z = ndtri(level)
        low = np.minimum(z, distance + z * ratio)
        high = np.maximum(z, distance + z * ratio)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            below = (1 - share) * ndtr(middle) + share * ndtr((middle - distance) / ratio)
            high = np.where(below >= level, middle, high)
            low = np.where(below >= level, low, middle)
        out[q] = 0.5 * (low + high)
    return out
