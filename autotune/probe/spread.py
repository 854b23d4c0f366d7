"""Distribution of repeated timings: median, tails, and whether it has two modes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.digits import extent, significant
from model.machine import Spread

#: a smaller group is outliers, not a mode
_MIN_SHARE = 0.15
#: how far apart two modes are at least: as a fraction of the lower one, and in standard deviations
_MIN_GAP = 0.15
_MIN_SDS = 4.0


@dataclass(frozen=True, slots=True)
class Modes:
    """Two groups of timings: their medians, and the share of the slow one."""

    fast: float
    slow: float
    slow_share: float

    def text(self) -> str:
        """ "bimodal: 11.4 and 14.0 (20% slow)"."""
        fast, slow = significant(self.fast), significant(self.slow)
        return f"bimodal: {fast} and {slow} ({self.slow_share:.0%} slow)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Timings of one thing in us, and their summary. ``modes`` is None for one mode."""

    median: float
    p05: float
    p95: float
    n: int
    modes: Modes | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Summarise; raises ``ValueError`` without values."""
        if not values:
            raise ValueError("no timings to summarise")
        x = np.sort(np.asarray(values, dtype=float))
        p05, median, p95 = np.percentile(x, [5, 50, 95])
        return cls(
            median=float(median), p05=float(p05), p95=float(p95), n=len(x), modes=find_modes(x)
        )

    def spread(self) -> Spread:
        """As a machine file keeps it; the values are us."""
        return Spread(median_us=self.median, p05_us=self.p05, p95_us=self.p95, n=self.n)

    def text(self, unit: str) -> str:
        """ "12.1 us (90 % within 11.4–14, n 300)"."""
        within = extent(self.p05, self.p95)
        line = f"{significant(self.median)} {unit} (90 % within {within}, n {self.n})"
        if self.modes is not None:
            line += f", {self.modes.text()}"
        return line


def find_modes(values: Sequence[float] | np.ndarray) -> Modes | None:
    """Split at the cut with the least variance inside the halves (Otsu); None for one mode.

    Two modes are said only when both hold a good share and lie far apart against their own spread,
    so that a long tail or a few outliers do not count.
    """
    x = np.sort(np.asarray(values, dtype=float))
    n = len(x)
    smallest = max(2, int(np.ceil(_MIN_SHARE * n)))
    if n < 2 * smallest:
        return None
    cuts = np.arange(smallest, n - smallest + 1)
    total, squares = np.cumsum(x), np.cumsum(x * x)
    low = squares[cuts - 1] - total[cuts - 1] ** 2 / cuts
    rest, rest_squares = total[-1] - total[cuts - 1], squares[-1] - squares[cuts - 1]
    high = rest_squares - rest**2 / (n - cuts)
    cut = int(cuts[np.argmin(low + high)])
    fast, slow = x[:cut], x[cut:]
    centre_fast, centre_slow = float(np.median(fast)), float(np.median(slow))
    # median deviations: one wild repeat must not hide two modes
    sd = 1.4826 * max(
        float(np.median(np.abs(fast - centre_fast))), float(np.median(np.abs(slow - centre_slow)))
    )
    gap = centre_slow - centre_fast
    empty = float(slow[0] - fast[-1])
    if gap < _MIN_GAP * centre_fast or gap < _MIN_SDS * sd or empty < 0.25 * gap:
        return None
    return Modes(centre_fast, centre_slow, (n - cut) / n)
