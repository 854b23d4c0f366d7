"""A comparison for people and for programs."""

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from autotune.compare import Compared, LevelComparison
from autotune.statistics import Ratio, Summary


def sentence(level: LevelComparison) -> str:
    """The answer at one concurrency, with its numbers."""
    decision = level.decision
    ratio = _ratio(decision.ratio)
    verdict = {
        "faster": f"A is faster than B: {ratio}",
        "slower": f"A is slower than B: {ratio}",
        "same": f"no difference beyond {100 * decision.margin:.1f} %: {ratio}",
        "undecided": f"undecided at this precision: {ratio}",
    }[decision.verdict]
    floor = level.noise_floor
    tail = ""
    if decision.verdict in ("faster", "slower") and floor is not None:
        size = abs(math.log(decision.ratio.median))
        if size < floor:
            tail = f"; smaller than the study's noise floor of {100 * floor:.1f} %"
    if level.same_knobs and decision.verdict in ("faster", "slower"):
        tail += (
            "; both are the same knobs, so this is one of the 5 % of false alarms or a carry-over"
        )
    return f"c={level.concurrency}: {verdict}{tail}"


def show_compared(found: Compared, screen: Console) -> None:
    """Print the answer: sentences first, then the table behind them."""
    for level in found.levels:
        screen.print(sentence(level), soft_wrap=True)
        needed = _needed(level, _pair_s(found))
        if needed:
            screen.print(f"  {needed}", soft_wrap=True)
    if found.levels:
        screen.print(_table(found))
    elif found.failure is None:
        screen.print("no pair was finished: nothing can be said")
    for finding in found.findings:
        line = f"{finding.severity}: {finding.subject}: {finding.reason}. {finding.fix}"
        screen.print(line, soft_wrap=True, markup=False)
    starts = f"{found.num_starts} start{'s' if found.num_starts != 1 else ''}"
    trials = " and ".join(
        f"{name} in trial {', '.join(map(str, numbers))}" for name, numbers in found.trials.items()
    )
    screen.print(
        f"{found.ended}; {starts}, {found.seconds:.0f} s; stored in study {found.study}: {trials}",
        soft_wrap=True,
    )
    if found.ended.startswith("stopped"):
        screen.print(
            "the pairs so far are kept; the same command starts a new comparison and does not pool "
            "it with this one: a test that is looked at, stopped and continued decides too often",
            soft_wrap=True,
        )


def compared_mapping(found: Compared) -> dict[str, Any]:
    """Plain values, units in the names."""
    return {
        "study": found.study,
        "metric": found.metric,
        "a": found.first.name,
        "b": found.second.name,
        "ended": found.ended,
        "num_starts": found.num_starts,
        "seconds": round(found.seconds, 2),
        "trials": {name: list(numbers) for name, numbers in found.trials.items()},
        "levels": [_level_mapping(found, level) for level in found.levels],
        "findings": [asdict(finding) for finding in found.findings],
        "failure": None
        if found.failure is None
        else {"arm": found.failed_arm, **found.failure.model_dump(mode="json")},
    }


def _level_mapping(found: Compared, level: LevelComparison) -> dict[str, Any]:
    decision = level.decision
    return {
        "concurrency": level.concurrency,
        "verdict": decision.verdict,
        "answer": sentence(level),
        "ratio_a_over_b": _ratio_mapping(decision.ratio),
        "ratio_of_medians": _ratio_mapping(decision.medians),
        "num_pairs": decision.num_pairs,
        "margin": decision.margin,
        "noise_floor": level.noise_floor,
        "precision": _finite(decision.precision),
        "pairs_needed": {f"{100 * e:g} %": n for e, n in decision.pairs_needed.items()},
        "a": _arm_mapping(found.first.knobs[level.concurrency], level.first),
        "b": _arm_mapping(found.second.knobs[level.concurrency], level.second),
        "same_knobs": level.same_knobs,
    }


def _arm_mapping(knobs: Any, summary: Summary) -> dict[str, Any]:
    return {
        "knobs_id": knobs.id,
        "label": knobs.label(),
        "median": summary.median,
        "low": _finite(summary.low),
        "high": _finite(summary.high),
        "n": summary.n,
        "flags": list(summary.flags),
    }


def _ratio_mapping(ratio: Ratio) -> dict[str, float | None]:
    low = ratio.low if math.isfinite(ratio.high) else None
    return {"median": ratio.median, "low": low, "high": _finite(ratio.high)}


def _table(found: Compared) -> Table:
    unit = "tok/s" if found.metric == "tokens_per_s" else "ms"
    table = Table(box=None, pad_edge=False)
    for head in (
        "c",
        f"A, {unit}\n(95 % CI, n)",
        f"B, {unit}\n(95 % CI, n)",
        "A/B ×\n(95 % CI)",
        "verdict",
        "noise\nfloor, %",
        "pairs for\n1 % / 2 %",
    ):
        table.add_column(head, justify="left" if head == "verdict" else "right")
    for level in found.levels:
        decision = level.decision
        needed = " / ".join(str(n) for n in decision.pairs_needed.values()) or "–"
        table.add_row(
            str(level.concurrency),
            _summary(level.first),
            _summary(level.second),
            _ratio(decision.ratio, short=True),
            decision.verdict,
            "–" if level.noise_floor is None else f"{100 * level.noise_floor:.1f}",
            needed,
        )
    return table


def _pair_s(found: Compared) -> float | None:
    """Seconds that a pair took, starts included."""
    pairs = max((level.decision.num_pairs for level in found.levels), default=0)
    return found.seconds / pairs if pairs else None


def _time(seconds: float) -> str:
    for unit, size in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _needed(level: LevelComparison, pair_s: float | None) -> str:
    decision = level.decision
    flags = [
        f"{name}: {', '.join(summary.flags)}"
        for name, summary in (("A", level.first), ("B", level.second))
        if summary.flags
    ]
    parts = []
    if math.isfinite(decision.precision):
        wanted = ", ".join(
            f"±{100 * effect:g} % needs {n} pairs"
            + (f" ({_time(n * pair_s)})" if pair_s is not None else "")
            for effect, n in decision.pairs_needed.items()
        )
        parts.append(f"{decision.num_pairs} pairs give ±{100 * decision.precision:.1f} %; {wanted}")
    return "; ".join([*parts, *flags])


def _ratio(ratio: Ratio, *, short: bool = False) -> str:
    if not math.isfinite(ratio.high):
        return (
            f"{ratio.median:.3f} (no interval)"
            if short
            else f"A/B = {ratio.median:.3f} ×, no interval yet (n = {_pairs(ratio.num_pairs)})"
        )
    spread = f"{ratio.low:.3f}–{ratio.high:.3f}"
    if short:
        return f"{ratio.median:.3f} ({spread})"
    return f"A/B = {ratio.median:.3f} × (95 % CI {spread}, n = {_pairs(ratio.num_pairs)})"


def _pairs(count: int) -> str:
    return f"{count} pair{'s' if count != 1 else ''}"


def _summary(summary: Summary) -> str:
    if summary.n < 2:
        return f"{summary.median:.1f} (n=1)"
    return f"{summary.median:.1f} ({summary.low:.1f}–{summary.high:.1f}, n={summary.n})"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
