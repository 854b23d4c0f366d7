"""An explanation as tables for people (100 columns) and as plain values for programs."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from autotune.digits import (
    change,
    interval_text,
    number,
    percent,
    significant,
    size_text,
    summary_text,
)
from autotune.explain.plans import settings_text
from autotune.explain.terms import TermRow
from model.spec import Interval

if TYPE_CHECKING:
    from autotune.explain.explanation import Explanation
    from autotune.explain.levers import Lever

_SHOWN_LEVERS = 10


def show(explanation: "Explanation", screen: Console) -> None:
    """Print an explanation."""
    subject = explanation.subject
    screen.print(subject.title, style="bold")
    screen.print(
        f"{subject.knobs.label()}; concurrency {subject.workload.concurrency}, context "
        f"{subject.workload.context} tokens, tp {subject.knobs.tp}",
    )
    for note in explanation.notes:
        screen.print(f"note: {note}")
    _terms(explanation, screen)
    _disagreements(explanation, screen)
    _acceptance(explanation, screen)
    _break_even(explanation, screen)
    _levers(explanation, screen)
    _nccl(explanation, screen)
    _importances(explanation, screen)
    _inert(explanation, screen)


def _heading(screen: Console, text: str) -> None:
    screen.print()
    screen.print(text, style="bold")


def _terms(explanation: "Explanation", screen: Console) -> None:
    _heading(screen, "Where the time goes")
    table = Table(box=None, pad_edge=False)
    table.add_column("term")
    table.add_column("measured, ms\n(95 % CI, n)", justify="right")
    table.add_column("predicted, ms\n(90 %)", justify="right")
    table.add_column("share\n%", justify="right")
    table.add_column("speed of\nlight, ms", justify="right")
    table.add_column("reached\n%", justify="right")
    table.add_column("")
    for row in explanation.rows:
        if row.name in ("cycle", "accept length"):
            table.add_section() if row.name == "cycle" else None
        unit = "" if row.unit == "ms" else f", {row.unit}"
        table.add_row(
            row.name + unit,
            summary_text(row.measured),
            interval_text(row.predicted),
            "–" if row.share is None else f"{100 * row.share:.1f}",
            "–" if row.speed_of_light is None else number(row.speed_of_light),
            "–" if row.of_light is None else f"{100 * row.of_light:.0f}",
            "≠" if row.disagreement is not None else "",
        )
    screen.print(table)
    screen.print(f"Predicted {explanation.predicted_when}.")


def _disagreements(explanation: "Explanation", screen: Console) -> None:
    measured = any(row.measured is not None for row in explanation.rows)
    if not measured:
        return
    if not explanation.disagreements:
        screen.print("Measurement and prediction agree within their uncertainties.")
        return
    screen.print("≠ measurement and prediction disagree beyond both uncertainties:")
    for row in explanation.disagreements:
        screen.print(f"  {row.name}: {row.disagreement}")


def _acceptance(explanation: "Explanation", screen: Console) -> None:
    report = explanation.acceptance
    if report is None:
        return
    _heading(screen, "Acceptance by depth (one more draft accepted, given that depth is reached)")
    table = Table(box=None, pad_edge=False)
    for head in (
        "depth",
        "verifies\nreaching it",
        "measured\n(95 % CI)",
        "model assumed\n(90 %)",
        "model now\n(90 %)",
        "",
    ):
        table.add_column(head, justify="right")
    for row in report.rows:
        table.add_row(
            str(row.depth),
            f"{row.reached:.0f}" if row.measured is not None else "–",
            rate_text(row.measured),
            rate_text(row.assumed),
            rate_text(row.learnt),
            "≠" if row.differs else "",
        )
    screen.print(table)
    for finding in report.findings:
        screen.print(f"  {finding}")


def _break_even(explanation: "Explanation", screen: Console) -> None:
    found = explanation.breakeven
    if found is None:
        return
    knobs = explanation.subject.knobs
    _heading(screen, "Break-even against speculation off")
    verdict = "pays" if found.pays else "does not pay"
    low, high = found.margin.low, found.margin.high
    doubt = ""
    if low < 1 < high:
        doubt = (
            f" by the medians, but that is open: {change(low)} to {change(high)} % tokens/s "
            f"against it (90 %), P(pays) {100 * found.probability:.0f} %"
        )
    screen.print(
        f"Speculation {verdict} here{doubt}. Accept length {found.accept_length:.2f}, needed "
        f"{found.accept_length_needed:.2f} (cycle {number(found.cycle_ms)} ms {found.cycle_source} "
        f"/ plain step {number(found.plain_step_ms)} ms {found.plain_source})."
    )
    if found.accept_length_needed > knobs.steps + 1:
        screen.print(
            f"{knobs.steps} draft steps give at most {knobs.steps + 1}: no acceptance is enough at "
            f"this cycle."
        )
    if found.verify_ms_allowed > 0:
        screen.print(
            f"At this accept length the verify may take {number(found.verify_ms_allowed)} ms; it "
            f"takes {number(found.verify_ms)} ms."
        )
    else:
        screen.print(
            "At this accept length no verify is fast enough: draft, extend and host alone take "
            "longer than the tokens are worth."
        )


def _levers(explanation: "Explanation", screen: Console) -> None:
    _heading(screen, "What could make it faster (predicted, tokens/s against these knobs)")
    if explanation.helping:
        table = Table(box=None, pad_edge=False)
        table.add_column("gain, %\n(90 %)", justify="right", no_wrap=True)
        table.add_column("cycle, ms", justify="right", no_wrap=True)
        table.add_column("P(faster)\n%", justify="right")
        shown = explanation.helping[:_SHOWN_LEVERS]
        seen = any(lever.measured_ratio is not None for lever in shown)
        if seen:
            table.add_column("measured, %\n(trial)", justify="right")
        table.add_column("lever: what to set", ratio=1)
        for lever in shown:
            cells = _lever_row(lever)
            table.add_row(*(cells if seen else (*cells[:3], cells[4])))
        screen.print(table)
    else:
        screen.print("Nothing the model knows is predicted to help.")
    outside = [lever for lever in explanation.helping if lever.in_space is False]
    if outside:
        screen.print("* outside the study's space: not searched.")
    if explanation.not_helping:
        parts = [
            f"{lever.name} ({percent(lever.gain.ratio.median)})"
            for lever in explanation.not_helping
        ]
        screen.print("Predicted not to help: " + ", ".join(parts) + ".")
    for item in explanation.headroom:
        hint = f"; {item.hint}" if item.hint else ""
        screen.print(
            f"At most: {item.term} {number(item.now_ms)} → {number(item.bound_ms)} ms "
            f"({item.bound}) would give {percent(item.ratio)}{hint}."
        )


def _lever_row(lever: "Lever") -> tuple[str, ...]:
    gain = lever.gain
    seen = "–"
    if lever.measured_ratio is not None:
        seen = f"{change(lever.measured_ratio)} ({lever.measured_trial})"
    star = "*" if lever.in_space is False else ""
    return (
        f"{change(gain.ratio.median)} ({change(gain.ratio.low)}…{change(gain.ratio.high)})",
        significant(gain.cycle_change_ms.median, sign=True),
        f"{100 * gain.probability:.0f}",
        seen,
        f"{lever.name}{star}: {lever.change}",
    )


def _nccl(explanation: "Explanation", screen: Console) -> None:
    knobs = explanation.subject.knobs
    _heading(screen, "What NCCL settings could change at most")
    bound = explanation.nccl
    if bound is None:
        reason = "one rank has nobody to reduce with"
        if knobs.tp > 1:
            reason = f"{knobs.collectives_backend} carries the all-reduce, not NCCL"
        screen.print(f"Nothing: {reason}.")
        return
    saved, share = bound.saved_ms, bound.saved_share
    own = bound.best.id == knobs.id
    which = (
        "by the medians none beats the present ones, and which one would is uncertain"
        if own
        else f"by the medians the best are {settings_text(bound.best)}"
    )
    screen.print(
        f"At most {number(saved.median)} ms of the cycle ({number(saved.low)}–"
        f"{number(saved.high)}), {100 * share.median:.1f} % ({100 * share.low:.1f}–"
        f"{100 * share.high:.1f}): {which}."
    )
    screen.print(f"Why: {bound.why}.")
    for plan in bound.plans[1:]:
        screen.print(f"     {plan.what}: at {size_text(plan.size_bytes)} NCCL runs {plan.text()}.")
    captured = knobs.graph_decode if knobs.method == "off" else knobs.graph_verify
    launches = "" if captured else ", with their share of the launches"
    all_reduce = "" if bound.measured_ms is None else f"; measured {number(bound.measured_ms)} ms"
    screen.print(
        f"All-reduces of the target forward{launches}: predicted {interval_text(bound.now_ms)} ms"
        f"{all_reduce}. {bound.num_settings} settings compared, {bound.num_inert} of them change "
        f"nothing; from the worst to the best: {interval_text(bound.swing_ms)} ms."
    )


def _importances(explanation: "Explanation", screen: Console) -> None:
    if not explanation.importances:
        return
    _heading(
        screen, "Which knobs mattered in this study (functional ANOVA of log speed, bootstrap)"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("verdict", no_wrap=True)
    table.add_column("knob", no_wrap=True)
    table.add_column("best over worst\nvalue, % (90 %)", justify="right", no_wrap=True)
    table.add_column("share of\nvariance, %", justify="right", no_wrap=True)
    table.add_column("why", ratio=1)
    for item in explanation.importances:
        effect, share = item.effect, item.share
        best = "" if item.best_value is None else f"best {item.best_value}; "
        table.add_row(
            item.verdict,
            item.knob,
            "–"
            if effect is None
            else f"{100 * effect.median:.1f} ({100 * effect.low:.1f}–{100 * effect.high:.1f})",
            "–" if share is None else f"{100 * share.median:.0f}",
            best + item.reason,
        )
    screen.print(table)


def _inert(explanation: "Explanation", screen: Console) -> None:
    judged = {i.knob for i in explanation.importances if i.verdict == "cannot matter"}
    rest = [item for item in explanation.inert if item.knob not in judged]
    if not rest:
        return
    _heading(screen, "Knobs that cannot matter here")
    by_reason: dict[str, list[str]] = {}
    for item in rest:
        by_reason.setdefault(item.reason, []).append(item.knob)
    for reason, knobs in by_reason.items():
        screen.print(f"  {', '.join(knobs)}: {reason}")


def to_json(explanation: "Explanation") -> dict[str, Any]:
    """Plain values, units in the names."""
    subject = explanation.subject
    values: dict[str, Any] = {
        "subject": subject.title,
        "study": None if subject.context is None else subject.context.view.name,
        "trial": None if subject.trial is None else subject.trial.number,
        "knobs_id": subject.knobs.id,
        "knobs": subject.knobs.values(),
        "workload": asdict(subject.workload),
        "predicted_when": explanation.predicted_when,
        "calibration_id": explanation.prediction.calibration_id,
        "notes": list(explanation.notes),
        "terms": [_row_json(row) for row in explanation.rows],
        "disagreements": {row.name: row.disagreement for row in explanation.disagreements},
        "acceptance": None if explanation.acceptance is None else asdict(explanation.acceptance),
        "break_even": None if explanation.breakeven is None else asdict(explanation.breakeven),
        "levers": [lever_json(lever) for lever in explanation.helping],
        "levers_not_helping": [lever_json(lever) for lever in explanation.not_helping],
        "headroom": [asdict(item) for item in explanation.headroom],
        "inert": {item.knob: item.reason for item in explanation.inert},
        "importances": [asdict(item) for item in explanation.importances],
        "nccl": None,
    }
    if explanation.nccl is not None:
        nccl = asdict(explanation.nccl)
        nccl["best"] = explanation.nccl.best.values()
        values["nccl"] = nccl
    return values


def _row_json(row: TermRow) -> dict[str, Any]:
    values = asdict(row)
    if row.measured is not None and row.measured.n < 2:
        values["measured"] |= {"low": None, "high": None}
    return values


def lever_json(lever: "Lever") -> dict[str, Any]:
    """A lever without its knobs' class."""
    values = asdict(lever)
    values["gain"]["knobs"] = lever.gain.knobs.values()
    values["knobs_id"] = lever.gain.knobs.id
    return values


def rate_text(interval: Interval | None) -> str:
    """A rate between 0 and 1 with its interval."""
    if interval is None:
        return "–"
    return f"{interval.median:.2f} ({interval.low:.2f}–{interval.high:.2f})"
