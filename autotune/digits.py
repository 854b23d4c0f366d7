"""Numbers and sizes as people read them: significant digits, never a power of ten."""

import math


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


def extent(low: float, high: float, digits: int = 3, dash: str = "–") -> str:
    """Both ends of a range: "0.812–12.3"."""
    return f"{significant(low, digits)}{dash}{significant(high, digits)}"


def size_text(num_bytes: float) -> str:
    """Bytes for people: "512 B", "14 KiB", "1.75 MiB"."""
    if num_bytes < 1 << 10:
        return f"{num_bytes:.0f} B"
    if num_bytes < 1 << 20:
        return f"{significant(num_bytes / (1 << 10))} KiB"
    return f"{significant(num_bytes / (1 << 20))} MiB"
