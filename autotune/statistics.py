"""Statistics of repeats: medians, bootstrap intervals, two arms measured in turns.

Rates vary by a factor, so comparisons work on log ratios. All resampling is seeded. Tests of pairs
are in ``autotune.signflip``, patterns of a series (drift, warm-up, two modes) in
``autotune.patterns``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autotune.patterns import drifts, is_bimodal, warms_up
from autotune.signflip import MIN_PAIRS_FOR_SIGNIFICANCE, fixed_interval

Verdict = Literal["faster", "slower", "same", "undecided"]

_MAX_RESAMPLES, _MIN_RESAMPLES = 2000, 100
#: values drawn for one interval, at most (large n needs fewer resamples)
_MAX_DRAWS = 400_000
#: what makes the percentile bootstrap of a median cover 95 % at few repeats, found by simulation
#: with normal, Student-t(3) and contaminated repeats (the tests repeat it); from n = 5 on the last
_WIDEN = {2: 11.0, 3: 4.3, 4: 1.65}
_WIDEN_MANY = 1.12


@dataclass(frozen=True, slots=True)
class Summary:
    """Median of n repeats with a 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    n: int
    #: repeats drift with time, or wander slowly (n >= 6)
    drifts: bool = False
    #: repeats fall into two groups far apart (n >= 6)
    bimodal: bool = False
    #: repeats at the start that differ from the rest
    num_warm_up: int = 0

    @property
    def flags(self) -> tuple[str, ...]:
        """What a reader must know of these repeats besides their interval."""
        found = (("drifts", self.drifts), ("two modes", self.bimodal))
        warm = (f"first {self.num_warm_up} differ",) if self.num_warm_up else ()
        return (*(name for name, on in found if on), *warm)

    @property
    def rel_half_width(self) -> float:
        """Half-width of the interval over the median; infinite when n < 2."""
        if self.n < 2 or self.median == 0:
            return math.inf
        return (self.high - self.low) / 2 / abs(self.median)


@dataclass(frozen=True, slots=True)
class Ratio:
    """a / b of two arms: estimate and 95 % interval."""

    median: float
    low: float
    high: float
    num_pairs: int

    def verdict(self, rel_floor: float) -> Verdict:
        """Which arm is larger: the interval excludes 1 and the estimate lies beyond the floor.

        An interval wholly inside the floor says "same" (two one-sided tests).
        """
        if self.low >= 1 - rel_floor and self.high <= 1 + rel_floor:
            return "same"
        if self.low > 1 and self.median > 1 + rel_floor:
            return "faster"
        if self.high < 1 and self.median < 1 - rel_floor:
            return "slower"
        return "undecided"


def summarise(values: Sequence[float], seed: int = 0) -> Summary:
    """Median and 95 % percentile-bootstrap interval of repeats in the order taken.

    With few repeats the percentile bootstrap is too narrow; ``_WIDEN`` stretches it about the
    median, never past zero: speeds and times are positive.
    Raises ``ValueError`` without values.
    """
    if not values:
        raise ValueError("no repeats to summarise")
    array = np.asarray(values, dtype=float)
    n, centre = len(array), float(np.median(array))
    if n == 1:
        return Summary(median=centre, low=-math.inf, high=math.inf, n=1)
    rng = np.random.default_rng(seed)
    draws = _resampled_medians(array, rng)
    low, high = np.quantile(draws, (0.025, 0.975))
    widen = _small_sample_factor(n)
    return Summary(
        median=centre,
        low=max(centre - (centre - float(low)) * widen, 0.0 if array.min() >= 0 else -math.inf),
        high=centre + (float(high) - centre) * widen,
        n=n,
        drifts=drifts(array),
        bimodal=is_bimodal(array),
        num_warm_up=warms_up(array),
    )


def paired_ratio(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Ratio:
    """Ratio first/second of arms measured in turns, repeat i of one beside repeat i of the other.

    From ``MIN_PAIRS_FOR_SIGNIFICANCE`` pairs on: the exact signed-rank interval of the log ratios
    of pairs. With fewer no exact 95 % interval is finite; then the percentile bootstrap over pairs,
    widened as in ``summarise``. Raises ``ValueError`` for unequal or missing arms.
    """
    logs = log_ratios(first, second)
    if len(logs) >= MIN_PAIRS_FOR_SIGNIFICANCE:
        exact = fixed_interval(logs)
        return Ratio(
            median=math.exp(exact.median),
            low=math.exp(exact.low),
            high=math.exp(exact.high),
            num_pairs=len(logs),
        )
    summary = summarise(logs.tolist(), seed)
    return Ratio(
        median=math.exp(summary.median),
        low=math.exp(summary.low),
        high=math.exp(min(summary.high, 700.0)),
        num_pairs=len(logs),
    )


def bootstrap_ratio(
    first: Sequence[float], second: Sequence[float], block: int = 1, seed: int = 0
) -> Ratio:
    """Ratio of the medians of two arms measured in turns: percentile bootstrap over pairs.

    Blocks of ``block`` neighbouring pairs are drawn together, so that what drifts through a block
    stays in it. Raises ``ValueError`` for unequal or missing arms.
    """
    log_ratios(first, second)
    arms = np.asarray([first, second], dtype=float)
    n = arms.shape[1]
    if n < 2:
        only = float(arms[0, 0] / arms[1, 0])
        return Ratio(median=only, low=0.0, high=math.inf, num_pairs=1)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, n, size=(_MAX_RESAMPLES, math.ceil(n / block)))
    drawn = (starts[:, :, None] + np.arange(block)).reshape(_MAX_RESAMPLES, -1)[:, :n] % n
    medians = np.median(arms[:, drawn], axis=2)
    centre = math.log(float(np.median(arms[0]) / np.median(arms[1])))
    low, high = np.quantile(np.log(medians[0] / medians[1]), (0.025, 0.975))
    widen = _small_sample_factor(n)
    return Ratio(
        median=math.exp(centre),
        low=math.exp(centre - (centre - float(low)) * widen),
        high=math.exp(min(centre + (float(high) - centre) * widen, 700.0)),
        num_pairs=n,
    )


def log_ratios(first: Sequence[float], second: Sequence[float]) -> np.ndarray:
    """ln(first / second) of each pair. Raises ``ValueError`` for unequal or missing arms."""
    if len(first) != len(second) or not first:
        raise ValueError(f"paired arms need equal lengths, got {len(first)} and {len(second)}")
    logs: np.ndarray = np.log(np.asarray(first, dtype=float) / np.asarray(second, dtype=float))
    return logs


def median_ratio(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Ratio:
    """Ratio of the medians of two arms, with a bootstrap interval over each arm's repeats."""
    if not first or not second:
        raise ValueError("a ratio of medians needs repeats of both arms")
    rng = np.random.default_rng(seed)
    arms = [np.asarray(values, dtype=float) for values in (first, second)]
    draws = [np.log(_resampled_medians(arm, rng)) for arm in arms]
    size = min(map(len, draws))
    logs = draws[0][:size] - draws[1][:size]
    centre = math.log(float(np.median(arms[0])) / float(np.median(arms[1])))
    n = min(len(first), len(second))
    widen = _small_sample_factor(n) if n > 1 else math.inf
    low, high = np.quantile(logs, (0.025, 0.975))
    spread = (centre - float(low), float(high) - centre)
    if n == 1:
        return Ratio(median=math.exp(centre), low=0.0, high=math.inf, num_pairs=1)
    return Ratio(
        median=math.exp(centre),
        low=math.exp(centre - spread[0] * widen),
        high=math.exp(centre + spread[1] * widen),
        num_pairs=n,
    )


def noise_floor(first: Sequence[float], second: Sequence[float], seed: int = 0) -> float:
    """Largest relative A/A difference that the 95 % interval allows, as a fraction."""
    ratio = paired_ratio(first, second, seed)
    return max(abs(math.log(ratio.low)), abs(math.log(ratio.high)))


def _resampled_medians(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    n = len(values)
    count = max(_MIN_RESAMPLES, min(_MAX_RESAMPLES, _MAX_DRAWS // n))
    drawn: np.ndarray = np.median(values[rng.integers(0, n, size=(count, n))], axis=1)
    return drawn


def _small_sample_factor(n: int) -> float:
    return _WIDEN.get(n, _WIDEN_MANY)
