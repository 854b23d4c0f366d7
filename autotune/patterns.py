"""What a series of repeats shows beside its level: drift, warm-up, two modes.

Each rule is calibrated to fire on at most about 1 % of stationary noise, heavy-tailed noise
included; the tests repeat the calibration.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autotune.ranks import rankdata
from model.normal import ndtri

Array = NDArray[np.float64]

#: fewer repeats show no pattern
MIN_REPEATS = 6

_P = 0.01
_DRAWS = 4000
#: lengths for which critical values are simulated; others use the next shorter (stricter) one
_LENGTHS = (6, 7, 8, 9, 10, 12, 15, 20, 30, 60)
#: a mode holds at least this share of the repeats
_MIN_SHARE = 0.2
#: two modes leave a gap of at least this share of the smaller group's range
_MIN_GAP = 0.4
#: fewer different values have no spread inside two groups to compare with
_MIN_DISTINCT = 4


def drifts(values: Array) -> bool:
    """The level moves with time: a trend beyond what autocorrelation explains, or a slow wander.

    ``values`` [N] in the order taken. Trend: Mann-Kendall with the variance inflated by the lag-1
    autocorrelation of what remains after the trend (Hamed and Rao 1998, first order). Wander: that
    autocorrelation itself, p < 0.005 one-sided.
    """
    n = len(values)
    if n < MIN_REPEATS or float(np.ptp(values)) == 0:
        return False
    ranks = rankdata(values)
    score = _concordance(ranks)
    times = np.arange(n, dtype=float)
    slope = float(np.polyfit(times, ranks, 1)[0])
    rest = ranks - slope * times
    correlation = _lag_one(rest)
    variance = n * (n - 1) * (2 * n + 5) / 18
    # only what is clearly positive counts, else short series would lose their trends
    significant = correlation * math.sqrt(n) > ndtri(0.95)
    inflation = (1 + correlation) / (1 - correlation) if significant else 1.0
    trend = (abs(score) - 1) / math.sqrt(variance * inflation) > ndtri(1 - _P / 2)
    wander = correlation * math.sqrt(n) + 1 / math.sqrt(n) > ndtri(1 - _P / 2)
    return bool(trend or wander)


def _concordance(values: Array) -> float:
    """Pairs that rise with time minus pairs that fall (Kendall's S), in n log^2 n steps."""
    n = len(values)
    if n <= 64:
        return float(np.tril(np.sign(np.subtract.outer(values, values))).sum())
    early, late = values[: n // 2], values[n // 2 :]
    ordered = np.sort(early)
    rising = np.searchsorted(ordered, late, "left").sum()
    falling = (len(early) - np.searchsorted(ordered, late, "right")).sum()
    return float(rising - falling) + _concordance(early) + _concordance(late)


def warms_up(values: Array) -> int:
    """How many repeats at the start differ from the rest, about; 0 when none do.

    The largest standardised rank mean of the first k repeats (k up to a third) against random
    orders of the same values, p < 0.01; a single odd first repeat of a short series shows nothing.
    """
    n = len(values)
    if n < MIN_REPEATS + 2:
        return 0
    scores = _start_scores(rankdata(values)[None, :])[0]
    if float(scores.max()) <= _critical_start(_floor_length(n)):
        return 0
    return int(np.argmax(scores)) + 1


def is_bimodal(values: Array) -> bool:
    """The values fall into two groups far apart against the spread inside each.

    Distance of the group means over the pooled standard deviation inside the groups, at the best
    cut; both groups hold at least 20 % (and two) of the repeats. Critical value: the 99.5 %
    quantile for uniform values, of all unimodal shapes the one that looks most like two groups
    (as in Hartigan's dip test). Heavy tails widen a group and so lower the statistic; long skewed
    tails are kept out by the gap, which must be wide against the range of the smaller group.
    Values may recur (a recording that is replayed, a rounded log), but not all of them.
    """
    n = len(values)
    if n < MIN_REPEATS or len(np.unique(values)) < _MIN_DISTINCT:
        return False
    return float(_separation(np.sort(values)[None, :])[0]) > _critical_separation(_floor_length(n))


def _lag_one(values: Array) -> float:
    centred = values - values.mean()
    total = float(centred @ centred)
    # what rounding leaves of a perfect line is no correlation
    if total < 1e-12 * (1.0 + float(values @ values)):
        return 0.0
    return min(0.95, float(centred[1:] @ centred[:-1]) / total)


def _start_scores(ranks_MN: Array) -> Array:
    """[M, K]: standardised difference of the mean rank of the first 1..K values from the rest."""
    n = ranks_MN.shape[1]
    sizes = np.arange(1, n // 3 + 1)
    means = np.cumsum(ranks_MN[:, : n // 3], axis=1) / sizes
    sd = np.sqrt((n + 1) * (n - sizes) / (12 * sizes))
    scores: Array = np.abs(means - (n + 1) / 2) / sd
    return scores


def _separation(ordered_MN: Array) -> Array:
    """[M]: distance of the group means over the pooled deviation inside, at the best cut."""
    n = ordered_MN.shape[1]
    smallest = max(2, math.ceil(_MIN_SHARE * n))
    sizes = np.arange(smallest, n - smallest + 1)
    centred = ordered_MN - ordered_MN.mean(axis=1, keepdims=True)
    sums = np.cumsum(centred, axis=1)[:, sizes - 1]
    # the rows are centred, so the upper group's sum is minus the lower one's
    distance = -sums * (1 / sizes + 1 / (n - sizes))
    gap = ordered_MN[:, sizes] - ordered_MN[:, sizes - 1]
    low_range = ordered_MN[:, sizes - 1] - ordered_MN[:, :1]
    high_range = ordered_MN[:, -1:] - ordered_MN[:, sizes]
    smaller = np.where(2 * sizes <= n, low_range, high_range)
    within = (centred**2).sum(axis=1, keepdims=True) - sums**2 * (1 / sizes + 1 / (n - sizes))
    scale = np.sqrt(np.maximum(within, 1e-24 * np.ptp(ordered_MN, axis=1, keepdims=True) ** 2) / n)
    scores = np.where(gap > _MIN_GAP * smaller, distance / np.maximum(scale, 1e-300), 0.0)
    best: Array = scores.max(axis=1)
    return best


def _floor_length(n: int) -> int:
    return max(length for length in _LENGTHS if length <= n)


@lru_cache(maxsize=len(_LENGTHS))
def _critical_separation(n: int) -> float:
    rng = np.random.default_rng(n)
    drawn = _separation(np.sort(rng.random((_DRAWS, n)), axis=1))
    return float(np.quantile(drawn, 1 - _P / 2))


@lru_cache(maxsize=len(_LENGTHS))
def _critical_start(n: int) -> float:
    rng = np.random.default_rng(n)
    ranks = rng.permuted(np.tile(np.arange(1.0, n + 1), (_DRAWS, 1)), axis=1)
    return float(np.quantile(_start_scores(ranks).max(axis=1), 1 - _P, method="higher"))
