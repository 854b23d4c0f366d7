"""Exact tests of paired log ratios by sign flips: once, or again and again as pairs come in.

Two equal arms whose order in a pair is drawn by coin give log ratios whose signs are coin flips,
whatever the noise: drift, two host speeds and heavy tails change magnitudes only (Fisher's
randomisation test). The statistic is Wilcoxon's signed-rank sum; its inversion gives the interval
(Walsh averages), so test and interval never contradict each other. Looking repeatedly spends the
error little by little (Lan and DeMets 1983, spending function alpha * n / max_pairs); boundaries
come from simulated flips of the observed magnitudes. The interval at a look is the repeated
confidence interval of Jennison and Turnbull (1989): it holds whenever one stops.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autotune.ranks import rankdata

Array = NDArray[np.float64]

#: error spent on both sides together. Claims are made at the 5 % level; the rest is kept for what
#: no coin removes (one arm warming the host for the other)
ALPHA = 0.034
#: below this many pairs no two-sided sign-flip test can reach 5 %
MIN_PAIRS_FOR_SIGNIFICANCE = 6

_NUM_FLIPS = 10_000


@dataclass(frozen=True, slots=True)
class LogInterval:
    """Estimate and interval of a log ratio; infinite where nothing can be said yet."""

    median: float
    low: float
    high: float
    num_pairs: int


def fixed_interval(log_ratios: Array) -> LogInterval:
    """Exact interval of one look planned beforehand (coverage at least 1 - ``ALPHA``).

    ``log_ratios`` [N]. Fewer than ``MIN_PAIRS_FOR_SIGNIFICANCE`` give an infinite interval.
    """
    return _inverted(log_ratios, _critical(len(log_ratios)))


class SequentialTest:
    """Looks at a growing list of pairs; the chance of any wrong rejection stays below ``alpha``."""

    def __init__(self, max_pairs: int, alpha: float = ALPHA, seed: int = 0) -> None:
        """Raises ``ValueError`` when so few pairs could never reject."""
        if max_pairs < MIN_PAIRS_FOR_SIGNIFICANCE:
            raise ValueError(
                f"max_pairs {max_pairs}: a two-sided test at 5 % needs at least "
                f"{MIN_PAIRS_FOR_SIGNIFICANCE} pairs"
            )
        self._max_pairs, self._alpha = max_pairs, alpha
        self._flips = _flips(max_pairs, seed)
        self._alive = np.ones(len(self._flips), dtype=bool)
        self._num_seen = 0

    def look(self, log_ratios: Array) -> LogInterval:
        """Judge all pairs so far, in the order taken; every look must see more than the last.

        Raises ``ValueError`` for more than ``max_pairs`` or a look that adds nothing.
        """
        n = len(log_ratios)
        if not self._num_seen < n <= self._max_pairs:
            raise ValueError(f"look at {n} pairs after {self._num_seen} of {self._max_pairs}")
        self._num_seen = n
        sums = np.abs(self._flips[:, :n] @ _ranks(log_ratios).astype(np.float32))
        num_spent = len(self._alive) - int(self._alive.sum())
        allowed = int(len(self._alive) * self._alpha * n / self._max_pairs) - num_spent
        inside = sums[self._alive]
        # at most ``allowed`` of the flips that never crossed before lie above this
        place = len(inside) - 1 - allowed
        critical = float(np.partition(inside, place)[place])
        self._alive &= sums <= critical
        return _inverted(log_ratios, critical)


def pairs_for(log_half_width: float, num_pairs: int, effect: float) -> int:
    """Pairs at which the interval's half-width falls to ``effect`` (a fraction), by 1/sqrt(n)."""
    wanted = math.log1p(effect)
    ratio = log_half_width / wanted
    return max(MIN_PAIRS_FOR_SIGNIFICANCE, math.ceil(num_pairs * ratio**2))


def _inverted(log_ratios: Array, critical: float) -> LogInterval:
    """All shifts that a signed-rank sum of at most ``critical`` does not reject."""
    n = len(log_ratios)
    centre = float(np.median(log_ratios))
    first, second = np.triu_indices(n)
    walsh = np.sort((log_ratios[first] + log_ratios[second]) / 2)
    total = len(walsh)
    index = math.ceil((total - critical) / 2)
    if index < 1:
        return LogInterval(centre, -math.inf, math.inf, n)
    low, high = float(walsh[index - 1]), float(walsh[total - index])
    # the Hodges-Lehmann estimate belongs to the interval; the median of pairs need not
    centre = float(np.median(walsh))
    return LogInterval(centre, low, high, n)


def _ranks(log_ratios: Array) -> Array:
    """Ranks of the magnitudes; a pair without any difference has no sign and no weight."""
    magnitudes = np.abs(log_ratios)
    ranks: Array = np.where(magnitudes > 0, rankdata(magnitudes), 0.0)
    return ranks


@lru_cache(maxsize=256)
def _critical(n: int) -> float:
    """Largest signed-rank sum that one look at ``n`` pairs does not reject."""
    total = n * (n + 1) // 2
    # counts[t]: sign patterns whose positive ranks sum to t
    counts = np.zeros(total + 1)
    counts[0] = 1.0
    for rank in range(1, n + 1):
        counts[rank:] = counts[rank:] + counts[:-rank].copy()
    tail = np.cumsum(counts / 2.0**n)
    num_rejected = int(np.searchsorted(tail, ALPHA / 2, side="right"))
    if num_rejected == 0:
        # not even the most extreme pattern may reject
        return float(total) + 1.0
    return float(total - 2 * num_rejected)


@lru_cache(maxsize=8)
def _flips(max_pairs: int, seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    flips = rng.integers(0, 2, size=(_NUM_FLIPS, max_pairs), dtype=np.int8)
    return (2 * flips - 1).astype(np.float32)
