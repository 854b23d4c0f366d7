"""Decides between two arms as pairs of repeats come in: faster, slower, same, undecided.

No clock and no backend: ``autotune.compare`` measures, ``bench/false_positives.py`` simulates, and
both ask this.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.signflip import (
    MIN_PAIRS_FOR_SIGNIFICANCE,
    LogInterval,
    SequentialTest,
    fixed_interval,
    pairs_for,
)
from autotune.statistics import Ratio, Verdict, bootstrap_ratio, log_ratios

#: pairs between two looks
LOOK_EVERY = 2
#: neighbouring pairs that the descriptive bootstrap draws together
_BLOCK = 2
#: differences whose cost in pairs every comparison states
EFFECTS = (0.01, 0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a comparison says so far of first / second, in the sense of "faster"."""

    verdict: Verdict
    #: signed-rank estimate with the 95 % interval that holds whenever one stops
    ratio: Ratio
    #: ratio of the medians, bootstrap over blocks of pairs: a description, not the test
    medians: Ratio
    num_pairs: int
    #: differences inside +- this count as none (fraction)
    margin: float
    #: half-width that this many pairs reach when they are planned and looked at once; a fraction
    precision: float
    #: effect (fraction) -> pairs at which the interval is that narrow, total
    pairs_needed: dict[float, int]

    @property
    def decided(self) -> bool:
        """Whether more pairs can't change the verdict's kind."""
        return self.verdict != "undecided"


def pair_order(seed: int, number: int) -> tuple[int, int]:
    """Which arm goes first in pair ``number``: a coin, so that AB AB, ABBA and BAAB all occur."""
    first = int(np.random.default_rng((seed, number)).integers(0, 2))
    return first, 1 - first


class Comparison:
    """Two arms, growing by pairs."""

    def __init__(self, max_pairs: int, margin: float, seed: int = 0) -> None:
        """``margin``: fraction inside which arms count as the same (the noise floor).

        Raises ``ValueError`` for too few pairs or a margin that is no positive fraction.
        """
        if not 0 < margin < 1:
            raise ValueError(f"margin {margin} must be above 0 and below 1, as a fraction")
        self.max_pairs, self.margin = max_pairs, margin
        self._test = SequentialTest(max_pairs, seed=seed)
        self.first: list[float] = []
        self.second: list[float] = []
        self._last = LogInterval(0.0, -math.inf, math.inf, 0)

    def add(self, first: float, second: float) -> bool:
        """Take one pair; whether the comparison is over (decided, or all pairs are used).

        Raises ``ValueError`` for what is no speed or time: zero, negative, infinite or NaN.
        """
        _check_positive((first, second))
        self.first.append(first)
        self.second.append(second)
        n = len(self.first)
        due = n >= MIN_PAIRS_FOR_SIGNIFICANCE and (n % LOOK_EVERY == 0 or n == self.max_pairs)
        if due:
            self._last = self._test.look(log_ratios(self.first, self.second))
        return n == self.max_pairs or (due and self._verdict() != "undecided")

    def finish(self) -> None:
        """A last look at pairs that came after the last one (time is up, or Ctrl-C)."""
        n = len(self.first)
        if n >= MIN_PAIRS_FOR_SIGNIFICANCE and self._last.num_pairs < n:
            self._last = self._test.look(log_ratios(self.first, self.second))

    def decision(self) -> Decision:
        """What the looks so far support. Raises ``ValueError`` before the first pair."""
        logs = log_ratios(self.first, self.second)
        n = len(logs)
        once = fixed_interval(logs)
        width = (once.high - once.low) / 2
        precision = math.expm1(width) if math.isfinite(width) else math.inf
        centre = self._last.median if self._last.num_pairs else float(np.median(logs))
        return Decision(
            verdict=self._verdict(),
            ratio=Ratio(
                median=math.exp(centre),
                low=math.exp(self._last.low),
                high=math.exp(min(self._last.high, 700.0))
                if math.isfinite(self._last.high)
                else math.inf,
                num_pairs=n,
            ),
            medians=bootstrap_ratio(self.first, self.second, min(_BLOCK, n)),
            num_pairs=n,
            margin=self.margin,
            precision=precision,
            pairs_needed={e: pairs_for(width, n, e) for e in EFFECTS}
            if math.isfinite(width)
            else {},
        )

    def _verdict(self) -> Verdict:
        low, high = self._last.low, self._last.high
        edge = math.log1p(self.margin)
        # two one-sided tests: a difference that is surely smaller than the margin is none
        if low >= -edge and high <= edge:
            return "same"
        if low > 0:
            return "faster"
        return "slower" if high < 0 else "undecided"


def decide(first: Sequence[float], second: Sequence[float], margin: float) -> Decision:
    """One look at a planned number of pairs. Raises ``ValueError`` as ``Comparison.add`` does."""
    _check_positive((*first, *second))
    whole = Comparison(max(len(first), MIN_PAIRS_FOR_SIGNIFICANCE), margin)
    whole.first, whole.second = list(first), list(second)
    whole.finish()
    return whole.decision()


def _check_positive(values: Sequence[float]) -> None:
    for value in values:
        if not 0 < value < math.inf:
            raise ValueError(f"{value} is no measured speed or time: ratios need positive numbers")
