"""Numbers and sizes as people read them: significant digits, never a power of ten."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.statistics import Summary
    from model.spec import Interval


def significant(value: float, digits: int = 3, *, sign: bool = False) -> str:
    """``value`` with at least ``digits`` significant digits: 0.00123, 12.3, 32247.

    All digits before the point stay: 32246.6 is "32247", not "3.22e+04". Values that are not
    finite are "nan", "inf" and "-inf". ``sign``: "+1.2" above zero.
    """
    plus = "+" if sign else "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:{plus}g}"
    # the power of ten that rounding leads to: 9.996 is 10.0
    power = int(f"{value:.{digits - 1}e}".partition("e")[2])
    text = f"{value:{plus}.{max(digits - 1 - power, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def extent(low: float, high: float, digits: int = 3) -> str:
    """Both ends of a range: "0.812–12.3"."""
    return f"{significant(low, digits)}–{significant(high, digits)}"


def size_text(num_bytes: float) -> str:
    """Bytes for people: "512 B", "14 KiB", "1.75 MiB"."""
    if num_bytes < 1 << 10:
        return f"{num_bytes:.0f} B"
    if num_bytes < 1 << 20:
        return f"{significant(num_bytes / (1 << 10))} KiB"
    return f"{significant(num_bytes / (1 << 20))} MiB"


def number(value: float) -> str:
    """For columns: three significant digits with their zeros, thousandths at the finest."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 0.0005:
        return "<0.001" if value > 0 else ">-0.001"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def percent(ratio: float) -> str:
    """A ratio as a change: 1.034 is "+3.4 %"."""
    return f"{change(ratio)} %"


def change(ratio: float) -> str:
    """A ratio as a change in percent, without the sign of percent: 1.034 is "+3.4"."""
    value = 100 * (ratio - 1)
    return f"{value:+.0f}" if abs(value) >= 99.5 else f"{value:+.1f}"


def summary_text(summary: "Summary | None") -> str:
    """Median with interval and n."""
    if summary is None:
        return "–"
    if summary.n < 2:
        return f"{number(summary.median)} (n=1)"
    flag = "".join(
        mark for mark, on in ((" drifts", summary.drifts), (" bimodal", summary.bimodal)) if on
    )
    return (
        f"{number(summary.median)} ({number(summary.low)}–{number(summary.high)}, "
        f"{summary.n}{flag})"
    )


def interval_text(interval: "Interval | None") -> str:
    """Median with its interval."""
    if interval is None:
        return "–"
    return f"{number(interval.median)} ({number(interval.low)}–{number(interval.high)})"
