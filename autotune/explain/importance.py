"""Which knobs moved the measured speed: effect with uncertainty, or why that cannot be told.

First-order functional ANOVA of log speed: an additive model of the knobs' values (ridge, one-hot,
each knob centred over the knobs that have it, so that only ``speculation.method`` carries what
speculation itself is worth), each knob's variance over its values taken equally often. The
bootstrap over knobs gives intervals; permuted residuals give what a knob without any effect would
show in this design. Suffixes: N knobs measured, P columns, F resamples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model.spec import Interval, Knobs, Scalar

Array = NDArray[Any]
Verdict = Literal["matters", "does not matter", "not enough data", "cannot matter"]

_SEED = 20250103
_RESAMPLES = 200
_RIDGE = 1.0
#: an effect whose interval stays below this (or the noise) does not matter
_NEGLIGIBLE = 0.01
_MIN_KNOBS = 6
_MIN_PER_VALUE = 2
_ABSENT = "not there"
_OF_SPECULATION = (
    "speculation.steps",
    "speculation.topk",
    "speculation.draft_tokens",
    "cuda_graph.draft",
    "cuda_graph.verify",
    "cuda_graph.extend",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """One knob of a study."""

    knob: str
    verdict: Verdict
    #: fastest over slowest value, others equal, minus 1 (fraction), 90 % bootstrap interval
    effect: Interval | None
    #: share of the variance of log speed that its values make
    share: Interval | None
    best_value: Scalar | None
    num_values: int
    reason: str


def importances(
    measured: Sequence[tuple[Knobs, float]],
    inert: Mapping[str, str],
    rel_noise: float,
    space: Mapping[str, Sequence[Scalar | None]],
) -> tuple[Importance, ...]:
    """Knobs of ``space`` that were measured with more than one value, most important first.

    ``measured``: knobs with their median speed; ``inert``: reasons by knob, from the model;
    ``rel_noise``: the noise floor as a fraction.
    """
    names = [name for name, values in space.items() if len(values) > 1]
    usable = [(knobs, speed) for knobs, speed in measured if speed > 0]
    rows = [knobs.values() for knobs, _ in usable]
    table = {name: [_value(row, name) for row in rows] for name in names}
    log_speed = np.log([speed for _, speed in usable]) if usable else np.zeros(0)
    found = []
    enough = len(usable) >= _MIN_KNOBS and float(np.ptp(log_speed)) > 0
    effects = _effects(table, log_speed) if enough else {}
    for name in names:
        values = tuple(v for v in _levels(table[name]) if v != _ABSENT)
        if name in inert:
            found.append(_without(name, "cannot matter", values, inert[name]))
        elif usable and not values and name == "speculation.draft_tokens":
            # without a single tree
            reason = "a chain's tokens follow from its steps"
            found.append(_without(name, "cannot matter", values, reason))
        elif name not in effects:
            reason = (
                f"{len(usable)} knobs measured, {_MIN_KNOBS} needed"
                if len(usable) < _MIN_KNOBS
                else "measured with one value only"
            )
            found.append(_without(name, "not enough data", values, reason))
        else:
            judged = _judged(name, effects[name], rel_noise)
            twin = next((other for other in effects if _vary_together(table, name, other)), None)
            if twin is not None and judged.verdict != "not enough data":
                reason = f"it was only varied together with {twin}: either may be behind it"
                judged = replace(judged, verdict="not enough data", reason=reason, best_value=None)
            found.append(judged)
    order = {"matters": 0, "not enough data": 1, "does not matter": 2, "cannot matter": 3}
    found.sort(key=lambda i: (order[i.verdict], -(i.share.median if i.share else 0.0)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Effect:
    values: tuple[Scalar | None, ...]
    counts: tuple[int, ...]
    means: Array
    ranges: Array
    shares: Array
    #: 95 % quantile of the range under permuted residuals
    null_range: float


def _effects(table: Mapping[str, Sequence[Scalar | None]], log_speed: Array) -> dict[str, _Effect]:
    columns: list[Array] = []
    spans: dict[str, tuple[int, int, tuple[Scalar | None, ...]]] = {}
    for name, row in table.items():
        values = tuple(value for value in _levels(row) if value != _ABSENT)
        if len(values) < 2:
            continue
        start = len(columns)
        there = np.array([v != _ABSENT for v in row])
        for value in values:
            column = np.array([v == value for v in row], dtype=float)
            # where the knob is not there it says nothing, and its absence is another knob's value
            columns.append(np.where(there, column - column[there].mean(), 0.0))
        spans[name] = (start, len(columns), values)
    if not columns:
        return {}
    x_NP = np.stack(columns, axis=1)
    rng = np.random.default_rng(_SEED)
    num = len(log_speed)
    whole_P = _coefficients(x_NP, log_speed, np.ones(num))
    # a resample is the same design with each row counted as often as it was drawn
    picks_FN = rng.integers(0, num, (_RESAMPLES, num))
    count_FN = np.stack([np.bincount(pick, minlength=num) for pick in picks_FN]).astype(float)
    boot_FP = _resampled(x_NP, log_speed, count_FN)
    total = max(float(np.var(log_speed)), 1e-18)
    solver_PN = _solver(x_NP)
    order_FN = np.argsort(rng.random((_RESAMPLES, num)), axis=1)
    found = {}
    for name, (start, stop, values) in spans.items():
        index = list(range(start, stop))
        others = np.delete(x_NP, np.arange(start, stop), axis=1)
        found[name] = _Effect(
            values=values,
            counts=tuple(sum(_same(v, value) for v in table[name]) for value in values),
            means=whole_P[index],
            ranges=np.ptp(boot_FP[:, index], axis=1),
            shares=np.clip(np.var(boot_FP[:, index], axis=1) / total, 0.0, 1.0),
            null_range=_null_range(others, log_speed, solver_PN[index], order_FN),
        )
    return found


def _null_range(others_NQ: Array, y_N: Array, solver_VN: Array, order_FN: Array) -> float:
    """95 % quantile of the range that a knob without effect shows in this design.

    Freedman and Lane: what the other knobs leave unexplained is permuted, their effects stay.
    """
    centred = y_N - y_N.mean()
    explained = others_NQ @ _coefficients(others_NQ, y_N, np.ones(len(y_N)))
    rest = centred - explained
    drawn_FN = explained + rest[order_FN]
    drawn_FN = drawn_FN - drawn_FN.mean(axis=1, keepdims=True)
    return float(np.quantile(np.ptp(drawn_FN @ solver_VN.T, axis=1), 0.95))


def _coefficients(x_NP: Array, y_N: Array, count_N: Array) -> Array:
    """[P]: the additive model of centred values (ridge), rows counted ``count_N`` times."""
    centred = y_N - np.average(y_N, weights=count_N)
    counted_PN = x_NP.T * count_N
    gram = counted_PN @ x_NP + _RIDGE * np.eye(x_NP.shape[1])
    result: Array = np.linalg.solve(gram, counted_PN @ centred)
    return result


def _resampled(x_NP: Array, y_N: Array, count_FN: Array) -> Array:
    """[F, P]: ``_coefficients`` for each row of counts, all normal equations in two products."""
    num, width = x_NP.shape
    pairs = (x_NP[:, :, None] * x_NP[:, None, :]).reshape(num, width * width)
    gram_FPP = (count_FN @ pairs).reshape(-1, width, width) + _RIDGE * np.eye(width)
    mean_F = (count_FN @ y_N) / count_FN.sum(axis=1)
    right_FP = count_FN @ (x_NP * y_N[:, None]) - mean_F[:, None] * (count_FN @ x_NP)
    result: Array = np.linalg.solve(gram_FPP, right_FP[:, :, None])[:, :, 0]
    return result


def _solver(x_NP: Array) -> Array:
    """[P, N]: coefficients of the additive model are this times centred values (ridge)."""
    gram = x_NP.T @ x_NP + _RIDGE * np.eye(x_NP.shape[1])
    result: Array = np.linalg.solve(gram, x_NP.T)
    return result


def _judged(name: str, effect: _Effect, rel_noise: float) -> Importance:
    low, _, high = (float(np.expm1(q)) for q in np.quantile(effect.ranges, [0.05, 0.5, 0.95]))
    share = Interval(*(float(q) for q in np.quantile(effect.shares, [0.5, 0.05, 0.95])))
    best = int(np.argmax(effect.means))
    null = float(np.expm1(effect.null_range))
    limit = max(_NEGLIGIBLE, rel_noise)
    point = float(np.expm1(np.ptp(effect.means)))
    if min(effect.counts) < _MIN_PER_VALUE and low <= null:
        verdict: Verdict = "not enough data"
        rare = effect.values[int(np.argmin(effect.counts))]
        reason = f"{rare} was measured {min(effect.counts)} time(s) only"
    elif point > null and high > limit:
        verdict = "matters"
        reason = f"beyond what chance gives in this design ({100 * null:.1f} %)"
    elif high <= limit:
        verdict, reason = "does not matter", f"its whole interval is below {100 * limit:.1f} %"
    else:
        verdict = "not enough data"
        reason = f"chance alone gives up to {100 * null:.1f} % in this design"
    return Importance(
        knob=name,
        verdict=verdict,
        effect=Interval(point, low, high),
        share=share,
        best_value=effect.values[best] if verdict == "matters" else None,
        num_values=len(effect.values),
        reason=reason,
    )


def _without(
    name: str, verdict: Verdict, values: Sequence[Scalar | None], reason: str
) -> Importance:
    return Importance(
        knob=name,
        verdict=verdict,
        effect=None,
        share=None,
        best_value=None,
        num_values=len(values),
        reason=reason,
    )


def _value(row: Mapping[str, Scalar | None], name: str) -> Scalar | None:
    """A knob's value, ``_ABSENT`` where the knobs have nothing that it could set.

    A draft tree and the graphs of its phases are not there without speculation, the graph of the
    plain step not with it: their canonical values then are no choice, and no effect of theirs.
    """
    there = row["speculation.method"] != "off"
    if name in _OF_SPECULATION and not there:
        return _ABSENT
    if name == "cuda_graph.decode" and there:
        return _ABSENT
    # a chain's length follows from its steps
    if name == "speculation.draft_tokens" and row["speculation.topk"] == 1:
        return _ABSENT
    return row.get(name)


def _vary_together(table: Mapping[str, Sequence[Scalar | None]], name: str, other: str) -> bool:
    """Whether two knobs had one value for each of the other's, wherever both are there."""
    if name == other:
        return False
    both = [
        (a, b)
        for a, b in zip(table[name], table[other], strict=True)
        if a != _ABSENT and b != _ABSENT
    ]
    pairs, mine = set(both), {a for a, _ in both}
    return len(mine) > 1 and len(mine) == len({b for _, b in both}) == len(pairs)


def _same(a: Scalar | None, b: Scalar | None) -> bool:
    """Equal, and True is not 1."""
    return type(a) is type(b) and a == b


def _levels(row: Sequence[Scalar | None]) -> tuple[Scalar | None, ...]:
    """Different values in a stable order; True is not 1."""
    seen = {(type(value).__name__, value): value for value in row}
    return tuple(seen[key] for key in sorted(seen, key=lambda key: (key[0], str(key[1]))))
