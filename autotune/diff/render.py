"""A comparison as tables for people (100 columns) and as plain values for programs."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from autotune.diff.compare import Comparison
from autotune.diff.measured import Measured
from autotune.diff.run import GROUPS, Run
from autotune.diff.worth import Worth
from autotune.digits import (
    change,
    interval_text,
    number,
    percent,
    significant,
    summary_text,
)
from autotune.statistics import Ratio

_CELL = 44
_SHOWN_PER_GROUP = 14


def show(found: Comparison, screen: Console) -> None:
    """Print a comparison: verdict first, then what supports it."""
    for side, run in (("A", found.a), ("B", found.b)):
        screen.print(f"{side}: {run.label}  [{run.kind}]")
        for note in run.notes:
            screen.print(f"   note: {note}")
    screen.print()
    screen.print(found.verdict.text, style="bold")
    _measured(found, screen)
    _differences(found, screen)
    _gaps(found, screen)
    if found.verdict.record_next:
        screen.print()
        screen.print("What to record next", style="bold")
        for line in found.verdict.record_next:
            screen.print(f"  {line}")


def _measured(found: Comparison, screen: Console) -> None:
    seen = found.measured
    if seen is None:
        return
    load = "load unknown" if seen.concurrency is None else f"concurrency {seen.concurrency}"
    screen.print()
    screen.print(f"Measured ({load})", style="bold")
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("A, median\n(95 % CI, n)", justify="right", no_wrap=True)
    table.add_column("B, median\n(95 % CI, n)", justify="right", no_wrap=True)
    table.add_column("B faster by, %\n(95 % CI)", justify="right", no_wrap=True)
    table.add_row(
        f"{seen.metric}, {seen.unit}",
        summary_text(seen.a),
        summary_text(seen.b),
        _ratio(seen.faster),
    )
    if seen.accept is not None:
        table.add_row("  of it accept length", "", "", _ratio(seen.accept))
    if seen.step is not None and seen.metric != "step time":
        table.add_row("  of it step time", "", "", _ratio(seen.step))
    screen.print(table)
    if found.predicted is not None:
        p = found.predicted
        screen.print(
            f"Predicted from the settings and the load that are known: {percent(p.median)} "
            f"({percent(p.low)}…{percent(p.high)}, 90 %)."
        )
    for check in found.steps:
        mark = "  ≠ beyond both uncertainties" if check.odd else ""
        screen.print(
            f"Step time of {check.side}: measured {summary_text(check.measured)} ms, predicted "
            f"{interval_text(check.predicted)} ms{mark}"
        )
    if seen.noise_floor is not None:
        screen.print(f"Noise floor (A/A): {100 * seen.noise_floor:.1f} %.")
    for note in seen.notes:
        screen.print(f"note: {note}")
    _terms(seen, screen)


def _terms(seen: Measured, screen: Console) -> None:
    clear = [term for term in seen.terms if term.clear]
    if not seen.terms:
        return
    if not clear:
        screen.print("No term of the cycle changed beyond its noise.")
        return
    parts = [
        f"{term.name} {number(term.a.median)} → {number(term.b.median)} ms "
        f"({significant(term.change_ms, sign=True)} ± {significant(term.half_width_ms, 2)})"
        for term in clear[:6]
    ]
    screen.print("Terms that changed beyond their noise: " + "; ".join(parts) + ".")


def _differences(found: Comparison, screen: Console) -> None:
    screen.print()
    screen.print(
        "What differs, and what it is predicted to be worth (tokens/s of B over A)", style="bold"
    )
    if not found.worths:
        screen.print("Nothing that is known on both sides differs.")
    table = Table(box=None, pad_edge=False)
    table.add_column("group", no_wrap=True)
    table.add_column("what: A → B", ratio=3)
    table.add_column("worth, %\n(90 %)", justify="right", no_wrap=True)
    table.add_column("why", ratio=2)
    for group in GROUPS:
        rows = [w for w in found.worths if w.differences[0].group == group]
        rows.sort(key=_order)
        for index, worth in enumerate(rows[:_SHOWN_PER_GROUP]):
            table.add_row(group if index == 0 else "", _what(worth), _worth(worth), worth.reason)
        if len(rows) > _SHOWN_PER_GROUP:
            names = ", ".join(w.title for w in rows[_SHOWN_PER_GROUP:])
            table.add_row("", f"and {len(rows) - _SHOWN_PER_GROUP} more: {names}", "", "")
    if found.worths:
        screen.print(table)
    if found.model is None:
        screen.print(f"No predictions: {found.why_no_model}.")
    elif found.model.assumed:
        assumed = [
            f"{n} {_plain(found.model.knobs_a.values().get(n))}" for n in found.model.assumed
        ]
        screen.print("Assumed alike where a side does not tell: " + ", ".join(assumed) + ".")


def _gaps(found: Comparison, screen: Console) -> None:
    if not found.gaps:
        return
    screen.print()
    screen.print("Unknown, therefore not compared", style="bold")
    for gap in found.gaps:
        keys = ""
        if gap.keys:
            shown = ", ".join(gap.keys[:6])
            more = f" and {len(gap.keys) - 6} more" if len(gap.keys) > 6 else ""
            keys = f" ({shown}{more})"
        screen.print(f"  {gap.group}{keys}: unknown on {gap.side}: {gap.why}")


def _order(worth: Worth) -> float:
    rank = {"predicted": 0.0, "at most": 1.0, "unknown": 2.0, "none": 3.0}[worth.kind]
    size = 0.0 if worth.ratio is None else abs(worth.ratio.median - 1)
    return rank - min(size, 0.99)


def _what(worth: Worth) -> str:
    parts = [f"{d.key}: {_cut(d.a)} → {_cut(d.b)}" for d in worth.differences]
    return "; ".join(parts)


def _worth(worth: Worth) -> str:
    if worth.ratio is None:
        return "unknown"
    if worth.kind == "none":
        return "0"
    r = worth.ratio
    if worth.kind == "at most":
        far = r.low if abs(r.low - 1) > abs(r.high - 1) else r.high
        return f"at most {change(far)}"
    return f"{change(r.median)} ({change(r.low)}…{change(r.high)})"


def _cut(text: str) -> str:
    return text if len(text) <= _CELL else text[: _CELL - 1] + "…"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "auto" if value is None else str(value)


def _ratio(ratio: Ratio) -> str:
    if ratio.num_pairs < 2:
        return f"{change(ratio.median)} (no interval)"
    return f"{change(ratio.median)} ({change(ratio.low)}…{change(ratio.high)})"


def to_json(found: Comparison) -> dict[str, Any]:
    """Plain values, units in the names; infinite bounds are null."""
    return {
        "verdict": found.verdict.kind,
        "text": found.verdict.text,
        "record_next": list(found.verdict.record_next),
        "a": _run_json(found.a),
        "b": _run_json(found.b),
        "measured": None if found.measured is None else _finite(asdict(found.measured)),
        "why_not_measured": found.why_not_measured or None,
        "steps": [{**_finite(asdict(check)), "odd": check.odd} for check in found.steps],
        "predicted_ratio": None if found.predicted is None else asdict(found.predicted),
        "why_no_model": found.why_no_model or None,
        "assumed": [] if found.model is None else list(found.model.assumed),
        "differences": [
            {
                "group": worth.differences[0].group,
                "what": worth.title,
                "values": {d.key: {"a": d.a, "b": d.b} for d in worth.differences},
                "worth": worth.kind,
                "ratio": None if worth.ratio is None else asdict(worth.ratio),
                "cycle_change_ms": None
                if worth.cycle_change_ms is None
                else asdict(worth.cycle_change_ms),
                "reason": worth.reason,
            }
            for worth in found.worths
        ],
        "unknown": [asdict(gap) for gap in found.gaps],
    }


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "label": run.label,
        "format": run.kind,
        "notes": list(run.notes),
        "concurrency": [series.concurrency for series in run.series],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
