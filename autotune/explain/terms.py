"""Measured beside predicted, term by term: shares, speed of light, and where the two disagree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.digits import extent, significant
from autotune.explain.subject import Repeat
from autotune.statistics import Summary, summarise
from model.spec import CYCLE_TERMS, DECODE_TERMS, Interval, Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class TermRow:
    """One quantity, in ``unit``; None where it was not measured or has no bound."""

    name: str
    unit: str
    measured: Summary | None
    predicted: Interval | None
    #: of the cycle, measured where measured; None for what is no part of it
    share: float | None
    speed_of_light: float | None
    #: speed of light over the time (measured where measured), 0 to 1
    of_light: float | None
    #: how measurement and prediction disagree beyond both uncertainties, or None
    disagreement: str | None


def term_rows(
    repeats: Sequence[Repeat], prediction: Prediction, *, same_model: bool = False
) -> tuple[TermRow, ...]:
    """Terms of the cycle in their order, then the cycle, the accept length and the speed."""
    speculative = prediction.knobs.method != "off"
    names = CYCLE_TERMS if speculative else DECODE_TERMS
    series = _series(repeats)
    cycle = _summary(series.get("cycle", []))
    extra = [n for n in series if n not in names and n not in _WHOLE and series[n]]
    parts = [
        (name, _summary(series.get(name, [])), prediction.terms_ms.get(name))
        for name in (*names, *sorted(extra))
    ]
    rest = _summary(_rest(repeats))
    if rest is not None and cycle is not None and rest.median > _REST_SHARE * cycle.median:
        parts.append((REST, rest, None))
    # medians of terms do not add up to the median of their sum: shares are of what is shown
    total = sum(value for _, seen, told in parts if (value := _shown(seen, told)) is not None)
    light_ms = prediction.speed_of_light_ms
    rows = [_row(name, "ms", seen, told, total, light_ms.get(name)) for name, seen, told in parts]
    light = sum(prediction.speed_of_light_ms.values())
    rows.append(_row("cycle", "ms", cycle, prediction.cycle_ms, total, light))
    if speculative:
        length = _summary(series.get("accept length", []))
        rows.append(_row("accept length", "tokens", length, prediction.accept_length, None, None))
    speed = _summary(series.get("speed", []))
    rows.append(_row("speed", "tok/s", speed, prediction.tokens_per_s, None, None))
    return tuple(rows)


#: row of what a measured cycle took beyond all of its terms
REST = "in no term"
#: below this share of the cycle it is not worth a row
_REST_SHARE = 0.01
#: series that are no term of the cycle
_WHOLE = ("cycle", "accept length", "speed")


def _series(repeats: Sequence[Repeat]) -> Mapping[str, list[float]]:
    found: dict[str, list[float]] = {}
    for repeat in repeats:
        for name, value in repeat.terms_ms.items():
            found.setdefault(name, []).append(value)
        for name, one in (
            ("cycle", repeat.cycle_ms),
            ("accept length", repeat.accept_length),
            ("speed", repeat.tokens_per_s),
        ):
            if one is not None:
                found.setdefault(name, []).append(one)
    return found


def _rest(repeats: Sequence[Repeat]) -> list[float]:
    """What each repeat's cycle took beyond its terms, ms; empty where it tells no terms."""
    return [
        max(repeat.cycle_ms - sum(repeat.terms_ms.values()), 0.0)
        for repeat in repeats
        if repeat.cycle_ms is not None and repeat.terms_ms
    ]


def _shown(measured: Summary | None, predicted: Interval | None) -> float | None:
    if measured is not None:
        return measured.median
    return None if predicted is None else predicted.median


def _summary(values: Sequence[float]) -> Summary | None:
    return summarise(values) if values else None


def _row(
    name: str,
    unit: str,
    measured: Summary | None,
    predicted: Interval | None,
    total: float | None,
    light: float | None,
) -> TermRow:
    value = _shown(measured, predicted)
    # a term that nothing bounds from below has no speed of light
    light = light if light is not None and light > 0 else None
    return TermRow(
        name=name,
        unit=unit,
        measured=measured,
        predicted=predicted,
        share=None if value is None or not total or name in _WHOLE else value / total,
        speed_of_light=light,
        of_light=None if light is None or not value else light / value,
        disagreement=disagreement(measured, predicted),
    )


def disagreement(measured: Summary | None, predicted: Interval | None) -> str | None:
    """How a measurement leaves the predicted 90 % interval beyond its own 95 % one, or None."""
    if measured is None or predicted is None or measured.n < 2 or predicted.median <= 0:
        return None
    if measured.low <= predicted.high and measured.high >= predicted.low:
        return None
    factor = measured.median / predicted.median
    edge = predicted.high if factor > 1 else predicted.low
    side = "above" if factor > 1 else "below"
    return (
        f"measured {significant(measured.median)} ({extent(measured.low, measured.high)}) is "
        f"{side} all of the predicted {extent(predicted.low, predicted.high)}: "
        f"{factor:.2f} × the median, "
        f"{measured.median / edge:.2f} × its edge"
    )
