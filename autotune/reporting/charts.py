"""Pictures of the report: bars of HTML for a cycle, one SVG for predicted against measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.dashboard.evidence import LevelEvidence
from autotune.digits import significant
from autotune.reporting.markup import Html, tag
from autotune.reporting.style import TERM_COLORS
from model.spec import CYCLE_TERMS, DECODE_TERMS, Interval, Prediction

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _PAD = 360.0, 300.0, 46.0, 36.0, 10.0
_POINT_COLORS = ("#3b78c4", "#c2703a", "#5a9e4b", "#b8478c", "#7a68c9", "#2f9c95")


def term_color(name: str) -> str:
    """One colour per part of a cycle, shared by plain and speculative decoding."""
    order = CYCLE_TERMS if name in CYCLE_TERMS else DECODE_TERMS
    twin = name.replace("decode.", "verify.") if name in DECODE_TERMS else name
    order = CYCLE_TERMS if twin in CYCLE_TERMS else order
    index = order.index(twin) if twin in order else len(TERM_COLORS) - 1
    return TERM_COLORS[index % len(TERM_COLORS)]


def cycle_bars(level: LevelEvidence, prediction: Prediction | None) -> Html:
    """Predicted above measured: one bar each, drawn to one scale, a segment per term."""
    predicted = {} if prediction is None else {
        name: value.median for name, value in prediction.terms_ms.items()
    }  # fmt: skip
    measured = {name: value for name in level.terms if (value := level.term_ms(name)) is not None}
    longest = max(sum(predicted.values()), sum(measured.values()), 1e-9)
    rows = []
    for title, terms in (("predicted", predicted), ("measured", measured)):
        total = sum(terms.values())
        segments = [
            tag(
                "span",
                style=f"width:{100 * terms[name] / longest:.2f}%;background:{term_color(name)}",
                title=f"{name}: {significant(terms[name])} ms",
            )
            for name in level.terms
            if terms.get(name)
        ]
        told = f"{significant(total)} ms" if terms else "not told"
        rows += [
            tag("div", title),
            tag("div", *segments, class_="bar", role="img", aria_label=f"{title}: {told}"),
            tag("div", told, class_="n"),
        ]
    return tag("div", *rows, class_="bars")


@dataclass(frozen=True, slots=True)
class Point:
    """One trial at one level."""

    predicted: Interval
    measured: float
    concurrency: int
    title: str
    is_baseline: bool


def scatter(points: Sequence[Point], unit: str) -> Html:
    """Predicted (x, with its 90 % interval) against measured (y) on logarithmic axes."""
    values = [p.measured for p in points] + [p.predicted.median for p in points]
    low, high = math.log(min(values) * 0.85), math.log(max(values) * 1.18)

    def x(value: float) -> float:
        share = (math.log(value) - low) / (high - low)
        return _LEFT + min(1.0, max(0.0, share)) * (_WIDTH - _LEFT - _PAD)

    def y(value: float) -> float:
        share = (math.log(value) - low) / (high - low)
        return _HEIGHT - _BOTTOM - min(1.0, max(0.0, share)) * (_HEIGHT - _BOTTOM - _PAD)

    start, end = math.exp(low), math.exp(high)
    parts = [_line(x(start), y(start), x(end), y(end), "diagonal")]
    for tick in _ticks(start, end):
        parts += [
            _line(x(tick), y(start), x(tick), y(end), "axis"),
            _line(x(start), y(tick), x(end), y(tick), "axis"),
            tag("text", f"{tick:g}", x=f"{x(tick):.1f}", y=_HEIGHT - _BOTTOM + 14,
                text_anchor="middle"),
            tag("text", f"{tick:g}", x=_LEFT - 4, y=f"{y(tick) + 4:.1f}", text_anchor="end"),
        ]  # fmt: skip
    levels = sorted({point.concurrency for point in points})
    for point in points:
        color = point_color(levels.index(point.concurrency))
        across, up = x(point.predicted.median), y(point.measured)
        parts.append(
            tag("line", x1=f"{x(point.predicted.low):.1f}", x2=f"{x(point.predicted.high):.1f}",
                y1=f"{up:.1f}", y2=f"{up:.1f}", stroke=color, stroke_opacity="0.45")
        )  # fmt: skip
        name = tag("title", point.title)
        if point.is_baseline:
            corners = ((0, -6), (6, 0), (0, 6), (-6, 0))
            path = " ".join(f"{across + dx:.1f},{up + dy:.1f}" for dx, dy in corners)
            parts.append(tag("polygon", name, points=path, fill=color, class_="point"))
        else:
            parts.append(
                tag("circle", name, cx=f"{across:.1f}", cy=f"{up:.1f}", r=4, fill=color,
                    class_="point")
            )  # fmt: skip
    middle = (_LEFT + _WIDTH) / 2
    parts += [
        tag("text", f"predicted before measuring, {unit}", x=middle, y=_HEIGHT - 6,
            text_anchor="middle"),
        tag("text", f"measured, {unit}", x=0, y=0, text_anchor="middle",
            transform=f"translate(11 {(_HEIGHT - _BOTTOM) / 2}) rotate(-90)"),
    ]  # fmt: skip
    return tag(
        "svg", *parts, viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}", role="img",
        aria_label="predicted against measured",
    )  # fmt: skip


def point_color(index: int) -> str:
    """Colour of the index-th level."""
    return _POINT_COLORS[index % len(_POINT_COLORS)]


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Html:
    return tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=kind)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten inside the range; the ends when there are fewer than two."""
    found = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        found += [m * 10.0**power for m in (1, 2, 5) if low <= m * 10.0**power <= high]
    if len(found) >= 2:
        return found
    return [float(f"{value:.3g}") for value in (low * 1.02, math.sqrt(low * high), high / 1.02)]
