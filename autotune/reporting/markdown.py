"""The report as Markdown, for an issue or a wiki."""

from collections.abc import Sequence

from autotune.digits import interval_text, number, summary_text
from autotune.report import front_pick, front_rows, front_title, verdict_text
from autotune.reporting.content import Report
from autotune.reporting.words import (
    HEADROOM_HEADS,
    NOISE_HEADS,
    commands,
    compared_rows,
    flagged,
    headroom_rows,
    inside_text,
    lever_gain,
    next_steps,
    noise_rows,
    num_more,
    predicted_points,
    provenance_rows,
    ratio_text,
    share_text,
    subtitle,
)

#: rows of predictions; a long study's stand in the JSON
_SHOWN_POINTS = 60
_ESCAPED = str.maketrans({char: f"\\{char}" for char in "\\`*_[]<>|#"})


def markdown(report: Report) -> str:
    """The whole report."""
    sentence = report.outcome.verdict()
    parts = [
        f"# Study {escape(report.view.name)}",
        escape(subtitle(report)),
        f"**{escape(sentence[:1].upper() + sentence[1:])}.**",
        "## Best configuration by load",
        _levels(report),
        *_fronts(report),
        "## Noise floor",
        _noise(report),
        "## Where the time of one cycle goes",
        *_cycles(report),
        "## Predicted against measured",
        *_predicted(report),
        "## What matters",
        _importances(report),
        "## Effective settings",
        _settings(report),
        "## Failures",
        _failures(report),
        "## Health of the runs",
        _health(report),
        *_compared(report),
        "## What to try next",
        *_next(report),
        "## Provenance",
        _table(("what", "value"), provenance_rows(report)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(value: object) -> str:
    """Text that Markdown shows as it is, on one line."""
    return " ".join(str(value).split()).translate(_ESCAPED)


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *([escape(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _levels(report: Report) -> str:
    unit = "tok/s" if report.outcome.metric.name == "tokens_per_s" else "ms"
    rows = []
    for level in report.levels:
        found = level.outcome
        floor = "–" if found.noise_floor is None else f"{100 * found.noise_floor:.1f}"
        rows.append(
            (
                found.concurrency,
                summary_text(found.baseline),
                summary_text(found.best) if found.ratio is not None else "–",
                ratio_text(found.ratio),
                verdict_text(found, report.outcome),
                floor,
                f"{found.knobs.label()} (trial {found.trial})",
            )
        )
    heads = (
        "concurrency", f"baseline, {unit} (95 % CI, n)", f"best, {unit} (95 % CI, n)",
        "speed-up (95 % CI)", "verdict", "noise floor, %", "best configuration",
    )  # fmt: skip
    return _table(heads, rows) if rows else "No level has a measured baseline yet."


def _fronts(report: Report) -> list[str]:
    """Only where a study has several objectives."""
    parts = []
    for front in report.outcome.fronts:
        heads, rows = front_rows(front)
        parts += [escape(front_title(front)) + ":", _table(heads, rows)]
    if not parts:
        return []
    return ["## Pareto front", *parts, escape(front_pick(report.outcome)) + "."]


def _noise(report: Report) -> str:
    rows = noise_rows(report)
    return _table(NOISE_HEADS, rows) if rows else "No A/A pair was measured."


def _predicted(report: Report) -> list[str]:
    points = predicted_points(report)
    if not points:
        return ["No trial has both a stored prediction and a measurement."]
    rows = [
        (p.trial, p.concurrency, interval_text(p.predicted), f"{p.measured:.1f}",
         "yes" if p.inside else "no", "the baseline" if p.is_baseline else p.label)
        for p in points[:_SHOWN_POINTS]
    ]  # fmt: skip
    heads = ("trial", "concurrency", "predicted before, tok/s (90 %)", "measured, tok/s", "inside",
             "configuration")  # fmt: skip
    rest = len(points) - len(rows)
    more = [f"{rest} more: `--format json` holds all."] if rest else []
    return [inside_text(points), _table(heads, rows), *more]


def _compared(report: Report) -> list[str]:
    if not report.compared:
        return []
    return ["## Comparisons in turns", _table(("A", "B", "answer"), compared_rows(report))]


def _cycles(report: Report) -> list[str]:
    parts = []
    heads = (
        "part", "measured, ms (95 % CI, n)", "predicted before, ms (90 %)", "share",
        "speed of light, ms",
    )  # fmt: skip
    for level in report.levels:
        if level.explanation is None:
            continue
        rows = [
            (row.name, summary_text(row.measured), interval_text(row.predicted),
             share_text(row.share),
             "–" if row.speed_of_light is None else number(row.speed_of_light))
            for row in level.explanation.rows
            if row.unit == "ms" or row.name == "accept length"
        ]  # fmt: skip
        label = escape(level.outcome.knobs.label())
        parts += [f"### Concurrency {level.concurrency}: {label}", _table(heads, rows)]
    return parts or ["The backend told no times per part of the cycle."]


def _importances(report: Report) -> str:
    rows = [
        (
            item.knob,
            item.verdict,
            "–"
            if item.effect is None
            else f"{100 * item.effect.median:.1f} "
            f"({100 * item.effect.low:.1f}–{100 * item.effect.high:.1f})",
            item.reason,
        )
        for item in report.importances
    ]
    if not rows:
        return "Too little is measured to tell which knobs matter."
    return _table(("knob", "verdict", "effect, % (90 %)", "why"), rows)


def _settings(report: Report) -> str:
    if not report.settings:
        return "The best configurations set no NCCL variable: NCCL's own choices hold."
    rows = [(s.name, s.asked, s.found, s.verdict, s.reason) for s in report.settings]
    return _table(("variable", "asked for", "in the workers", "verdict", "why"), rows)


def _failures(report: Report) -> str:
    if not report.failures:
        return "No trial failed."
    return "\n".join(
        f"- trial {f.number}: {f.failure.kind} at {f.failure.stage}: "
        f"{escape(f.failure.message)} ({escape(f.label)})"
        for f in report.failures
    )


def _health(report: Report) -> str:
    lines = [
        f"- {f.severity}: {escape(f.subject)}: {escape(f.reason)}. {escape(f.fix)}"
        for f in report.findings
    ]
    lines += [f"- {escape(line)}" for line in flagged(report)]
    return "\n".join(lines) or "Clocks, throttling, acceptance and the repeats show nothing odd."


def _next(report: Report) -> list[str]:
    rows = [
        (level, lever_gain(lever), f"{100 * lever.gain.probability:.0f} %",
         f"{lever.name}: {lever.change}")
        for level, lever in next_steps(report)
    ]  # fmt: skip
    heads = ("concurrency", "predicted gain, % (90 %)", "P(faster)", "change")
    parts = [_table(heads, rows) if rows else "Nothing the model knows is expected to be faster."]
    if report.headroom:
        parts += ["How far each part is from its bound:",
                  _table(HEADROOM_HEADS, headroom_rows(report))]  # fmt: skip
    more = num_more(report)
    if more is not None:
        parts.append(more)
    return [*parts, "```\n" + "\n".join(commands(report)) + "\n```"]
