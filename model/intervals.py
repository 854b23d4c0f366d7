"""Quantiles of predicted times: log-normal, or a mixture of two where the host has two modes."""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.normal import ndtr, ndtri, normal_pdf

Array = NDArray[Any]
Index = NDArray[np.intp]

#: a 90 % interval reaches this many standard deviations to each side
Z90 = 1.6448536269514722
QUANTILES = (0.05, 0.5, 0.95)
#: Newton steps at most, and the distance at which they end, in sd of the first mode
_STEPS, _CLOSE = 60, 1e-10
#: grid of the distance between the modes, in sd of the first, and of the ratio of the sds
_DISTANCE = np.sinh(np.linspace(-np.arcsinh(80.0), np.arcsinh(80.0), 401))
_RATIO = np.exp(np.linspace(np.log(0.25), np.log(4.0), 25))


def mixture_quantiles(
    log_fast: ArrayLike, sd_fast: ArrayLike, log_slow: ArrayLike, sd_slow: ArrayLike, share: float
) -> Array:
    """5 %, 50 % and 95 % quantiles, [3, N], of (1 - share) LogN(fast) + share LogN(slow).

    Interpolated in a grid of the standardised mixture (error below 1 % of an sd but next to a
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
    corners = _corners(share, i, j)
    near = corners[0] * (1 - v) + corners[1] * v
    far = corners[2] * (1 - v) + corners[3] * v
    result: Array = near + (far - near) * u
    return result


def _corners(share: float, i: Index, j: Index) -> Array:
    """Quantiles at the grid points (i, j), (i, j + 1), (i + 1, j), (i + 1, j + 1): [4, 3, M]."""
    points = np.stack([i, i, i + 1, i + 1]) * _RATIO.size + np.stack([j, j + 1, j, j + 1])
    grid = _grid(share)
    wanted = np.zeros(grid.shape[1], dtype=bool)
    wanted[points] = True
    missing = np.flatnonzero(wanted & np.isnan(grid[0]))
    if missing.size:
        rows, columns = np.divmod(missing, _RATIO.size)
        grid[:, missing] = _quantiles(share, _DISTANCE[rows], _RATIO[columns])
    found: Array = np.moveaxis(grid[:, points], 0, 1)
    return found


@lru_cache(maxsize=16)
def _grid(share: float) -> Array:
    """Quantiles of (1 - share) N(0, 1) + share N(distance, ratio^2) on the grid, [3, D x R].

    NaN where nobody asked yet: a space of 50,000 knobs touches a small part.
    """
    return np.full((3, _DISTANCE.size * _RATIO.size), np.nan)


def _quantiles(share: float, distance: Array, ratio: Array) -> Array:
    """[3, M] quantiles for distances [M] and ratios [M]: Newton steps in a bracket."""
    levels = np.array(QUANTILES)[:, None]
    z = ndtri(levels)
    low = np.minimum(z, distance + z * ratio)
    high = np.maximum(z, distance + z * ratio)
    middle = 0.5 * (low + high)
    for _ in range(_STEPS):
        far = (middle - distance) / ratio
        above = (1 - share) * ndtr(middle) + share * ndtr(far) - levels
        slope = (1 - share) * normal_pdf(middle) + share * normal_pdf(far) / ratio
        high, low = np.where(above >= 0, middle, high), np.where(above >= 0, low, middle)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            step = middle - above / slope
        # between two far modes the density vanishes: halve the bracket there
        following = np.where((step > low) & (step < high), step, 0.5 * (low + high))
        if np.all((np.abs(following - middle) < _CLOSE) | (high - low < _CLOSE)):
            break
        middle = following
    return middle
