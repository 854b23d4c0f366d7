"""The measured difference of two runs: on a metric that both took alike, with its noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.diff.run import Run, Series
from autotune.statistics import Ratio, Summary, median_ratio, summarise

#: server intervals without gaps are decoding only, as decode speed is
_DECODING = ("decode", "server interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class TermChange:
    """One term of the cycle on both sides, ms."""

    name: str
    a: Summary
    b: Summary
    #: medians' difference with the sum of the half-widths (95 %)
    change_ms: float
    half_width_ms: float

    @property
    def clear(self) -> bool:
        """Whether the change is beyond its noise."""
        return abs(self.change_ms) > self.half_width_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """B against A at one load."""

    concurrency: int | None
    metric: str
    unit: str
    a: Summary
    b: Summary
    #: B over A, turned so that above 1 is faster
    faster: Ratio
    noise_floor: float | None
    #: accept length of B over A, and the rest of the ratio (1 / step time), where both told
    accept: Ratio | None
    step: Ratio | None
    terms: tuple[TermChange, ...]
    notes: tuple[str, ...]


def measured(a: Run, b: Run, concurrency: int | None) -> tuple[Measured | None, str]:
    """The difference at a load (None: the best common one), or why there is none."""
    pair, why = _common(a, b, concurrency)
    if pair is None:
        return None, why
    left, right, level, notes = pair
    chosen, why = _metric(left, right)
    if chosen is None:
        return None, why
    metric, unit, first, second, more_is_faster, note = chosen
    ratio = median_ratio(second, first)
    if not more_is_faster:
        ratio = Ratio(
            median=1 / ratio.median,
            low=0.0 if math.isinf(ratio.high) else 1 / ratio.high,
            high=math.inf if ratio.low <= 0 else 1 / ratio.low,
            num_pairs=ratio.num_pairs,
        )
    floors = [
        run.noise_floors[level] for run in (a, b) if level is not None and level in run.noise_floors
    ]
    return (
        Measured(
            concurrency=level,
            metric=metric,
            unit=unit,
            a=summarise(first),
            b=summarise(second),
            faster=ratio,
            noise_floor=max(floors) if floors else None,
            accept=_accept(a, b, left, right),
            step=_ratio(left.cycle_ms, right.cycle_ms),
            terms=_terms(left, right),
            notes=(*notes, *([note] if note else [])),
        ),
        "",
    )


def _common(
    a: Run, b: Run, concurrency: int | None
) -> tuple[tuple[Series, Series, int | None, list[str]] | None, str]:
    for side, run in (("A", a), ("B", b)):
        if not run.series:
            return None, f"{side} holds no measured speed"
    shared = [level for level in a.levels() if level in b.levels() and level is not None]
    if concurrency is not None:
        if concurrency in shared:
            shared = [concurrency]
        elif None in (*a.levels(), *b.levels()):
            shared = []
        else:
            return None, (
                f"concurrency {concurrency} is not measured on both sides "
                f"(A: {_listed(a)}; B: {_listed(b)})"
            )
    if shared:
        level = max(shared, key=lambda n: (_count(a, n) * _count(b, n), -n))
        left, right = a.at(level), b.at(level)
        assert left is not None
        assert right is not None
        return (left, right, level, []), ""
    unknown_a, unknown_b = a.at(None), b.at(None)
    if unknown_a is None and unknown_b is None:
        return None, f"no load in common (A: {_listed(a)}; B: {_listed(b)})"
    left = unknown_a or a.series[0]
    right = unknown_b or b.series[0]
    load = left.concurrency if left.concurrency is not None else right.concurrency
    return (left, right, load, ["one side does not tell its load: the loads may differ"]), ""


def _count(run: Run, level: int) -> int:
    series = run.at(level)
    return 0 if series is None else max(len(series.tokens_per_s), len(series.cycle_ms))


def _listed(run: Run) -> str:
    return ", ".join("unknown" if level is None else str(level) for level in run.levels())


_Metric = tuple[str, str, tuple[float, ...], tuple[float, ...], bool, str | None]


def _metric(left: Series, right: Series) -> tuple[_Metric | None, str]:
    """A metric that both sides took alike, throughput first."""
    kinds = (left.definition, right.definition)
    if left.tokens_per_s and right.tokens_per_s:
        note = None
        if kinds[0] != kinds[1] and all(kind in _DECODING for kind in kinds):
            note = "a server's interval is compared with decode speed: both hold decoding only"
        if kinds[0] == kinds[1] or note is not None:
            if kinds[0] == "server interval with gaps":
                note = "both speeds are over wall time with prefill and idle gaps in it"
            found = (left.tokens_per_s, right.tokens_per_s)
            return ("speed", "tok/s", *found, True, note), ""
    if left.tpot_ms and right.tpot_ms:
        return ("time per output token", "ms", left.tpot_ms, right.tpot_ms, False, None), ""
    if left.cycle_ms and right.cycle_ms:
        note = "a step emits as many tokens as are accepted: step time alone is no speed"
        return ("step time", "ms", left.cycle_ms, right.cycle_ms, False, note), ""
    if left.tokens_per_s and right.tokens_per_s:
        return None, (
            f"no metric that both took alike: A is {_DEFINITIONS[str(kinds[0])]}, B is "
            f"{_DEFINITIONS[str(kinds[1])]}; such numbers must not be compared"
        )
    return None, f"no metric in common (A has {_has(left)}; B has {_has(right)})"


_DEFINITIONS = {
    "decode": "decode speed",
    "server interval": "the server's decode speed",
    "server interval with gaps": "the server's wall-clock speed with prefill and idle time",
    "wall clock": "tokens over the whole duration, prefill included",
    "None": "of unknown definition",
}


def _has(series: Series) -> str:
    names = {
        "tok/s": series.tokens_per_s,
        "step time": series.cycle_ms,
        "time per output token": series.tpot_ms,
        "accept length": series.accept_length,
    }
    return ", ".join(name for name, values in names.items() if values) or "nothing"


def _ratio(top: Sequence[float], bottom: Sequence[float]) -> Ratio | None:
    if not top or not bottom or min(top) <= 0 or min(bottom) <= 0:
        return None
    return median_ratio(top, bottom)


def _accept(a: Run, b: Run, left: Series, right: Series) -> Ratio | None:
    """Accept length of B over A; plain decoding emits one token a step."""
    lengths = []
    for run, series in ((a, left), (b, right)):
        off = run.knobs.get("speculation.method") == "off"
        lengths.append(series.accept_length or ((1.0, 1.0, 1.0) if off else ()))
    if all(set(values) == {1.0} for values in lengths):
        return None
    return _ratio(lengths[1], lengths[0])


def _terms(left: Series, right: Series) -> tuple[TermChange, ...]:
    found = []
    for name in left.terms_ms:
        first, second = left.terms_ms[name], right.terms_ms.get(name, ())
        if not first or not second:
            continue
        a, b = summarise(first), summarise(second)
        half = math.hypot(_half(a), _half(b))
        found.append(
            TermChange(name=name, a=a, b=b, change_ms=b.median - a.median, half_width_ms=half)
        )
    return tuple(sorted(found, key=lambda change: -abs(change.change_ms)))


def _half(summary: Summary) -> float:
    return math.inf if summary.n < 2 else (summary.high - summary.low) / 2
