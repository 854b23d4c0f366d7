"""The report as one HTML page that needs nothing but itself."""

from autotune.digits import interval_text, number, summary_text
from autotune.report import front_pick, front_rows, front_title, verdict_text
from autotune.reporting.charts import Point, cycle_bars, point_color, scatter, term_color
from autotune.reporting.content import LevelReport, Report
from autotune.reporting.markup import Html, join, section, table, tag, text
from autotune.reporting.style import CSS
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

_LOG_LINES = 40
_TONES = {"faster": "good", "slower": "bad", "undecided": "warn"}


def page(report: Report) -> str:
    """The whole page."""
    title = f"Study {report.view.name}"
    parts = [
        tag("h1", title),
        tag("p", subtitle(report), class_="soft"),
        _verdict(report),
        _levels(report),
        _fronts(report),
        _floors(report),
        _timeline(report),
        _plot(report),
        _importances(report),
        _settings(report),
        _failures(report),
        _health(report),
        _compared(report),
        _next(report),
        _provenance(report),
    ]
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        tag("style", Html(CSS)),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", tag("main", *parts)), lang="en")


def _verdict(report: Report) -> Html:
    outcome = report.outcome
    lost = bool(outcome.levels) or outcome.baseline_failure is not None
    tone = "good" if outcome.anything_won else "bad" if lost else ""
    sentence = report.outcome.verdict()
    return tag(
        "p", sentence[:1].upper() + sentence[1:] + ".", class_=f"verdict {tone}".strip(),
        id="verdict",
    )  # fmt: skip


def _unit(report: Report) -> str:
    return "tok/s" if report.outcome.metric.name == "tokens_per_s" else "ms"


def _levels(report: Report) -> Html:
    unit = _unit(report)
    heads = (
        "concurrency", f"baseline, {unit} (95 % CI, n)", f"best, {unit} (95 % CI, n)",
        "speed-up (95 % CI)", "verdict", "accept length", "output",
    )  # fmt: skip
    rows = []
    for level in report.levels:
        found = level.outcome
        alone = found.ratio is None
        speculative = found.knobs.method != "off" and found.accept_length is not None
        rows.append(
            (
                str(found.concurrency),
                summary_text(found.baseline),
                "–" if alone else summary_text(found.best),
                ratio_text(found.ratio),
                _toned(verdict_text(found, report.outcome), found.verdict),
                f"{found.accept_length:.2f}" if speculative else "–",
                found.output_check,
            )
        )
    chosen = [
        tag(
            "li", f"at concurrency {level.concurrency}: {level.outcome.knobs_text()} ",
            tag("span", f"(trial {level.outcome.trial}, knobs {level.outcome.knobs.id})",
                class_="soft"),
        )
        for level in report.levels
    ]  # fmt: skip
    body: list[object] = [table(heads, rows, numeric=(0, 1, 2, 3, 5))]
    if chosen:
        body += [tag("p", "The best measured configuration:"), tag("ul", *chosen)]
    else:
        body = [tag("p", "No level has a measured baseline yet.")]
    return section("Best configuration by load", *body, anchor="best")


def _fronts(report: Report) -> Html:
    """Only where a study has several objectives."""
    parts: list[object] = []
    for front in report.outcome.fronts:
        heads, rows = front_rows(front)
        numeric = tuple(range(1, len(heads) - 1))
        parts += [tag("h3", front_title(front)), table(heads, rows, numeric=numeric)]
    if not parts:
        return Html("")
    return section("Pareto front", *parts, tag("p", front_pick(report.outcome)), anchor="pareto")


def _toned(words: str, verdict: str) -> Html:
    return tag("span", words, class_=_TONES.get(verdict))


def _floors(report: Report) -> Html:
    rows = noise_rows(report)
    if not rows:
        return section("Noise floor", tag("p", "No A/A pair was measured."), anchor="noise")
    told = (
        "The baseline measured twice, in turns: the largest difference that the 95 % interval of "
        "this A/A pair allows. A gain below it is not claimed."
    )
    return section(
        "Noise floor", tag("p", told, class_="soft"), table(NOISE_HEADS, rows, (0, 1, 2)),
        anchor="noise",
    )  # fmt: skip


def _timeline(report: Report) -> Html:
    parts: list[object] = []
    for level in report.levels:
        if level.evidence is not None and level.evidence.terms:
            parts += _cycle(level)
    if not parts:
        parts = [tag("p", "The backend told no times per part of the cycle.")]
    return section("Where the time of one cycle goes", *parts, anchor="cycle")


def _cycle(level: LevelReport) -> list[object]:
    assert level.evidence is not None
    evidence, outcome = level.evidence, level.outcome
    heading = f"Concurrency {level.concurrency}: {outcome.knobs.label()}"
    explained = level.explanation
    prediction = evidence.predicted if explained is None else explained.prediction
    parts: list[object] = [tag("h3", heading), cycle_bars(evidence, prediction)]
    rows = []
    if explained is None:
        for name in evidence.terms:
            predicted = None if evidence.predicted is None else evidence.predicted.terms_ms[name]
            measured = evidence.term_ms(name)
            rows.append(
                (_term(name), "–" if measured is None else number(measured),
                 interval_text(predicted), "–", "–")
            )  # fmt: skip
    else:
        for row in explained.rows:
            if row.unit != "ms" and row.name != "accept length":
                continue
            rows.append(
                (
                    _term(row.name),
                    summary_text(row.measured),
                    interval_text(row.predicted),
                    share_text(row.share),
                    "–" if row.speed_of_light is None else number(row.speed_of_light),
                )
            )
    when = "before it was measured" if explained is None else explained.predicted_when
    heads = (
        "part", "measured, ms (95 % CI, n)", f"predicted {when}, ms (90 %)", "share",
        "speed of light, ms",
    )  # fmt: skip
    parts.append(table(heads, rows, numeric=(1, 2, 3, 4), dense=True))
    if explained is not None:
        parts += [
            tag("p", f"{row.name}: {row.disagreement}", class_="warn")
            for row in explained.disagreements
        ]
    return parts


def _term(name: str) -> Html:
    swatch = tag("span", class_="swatch", style=f"background:{term_color(name)}")
    return join((swatch, name)) if name not in ("cycle", "accept length") else text(name)


def _plot(report: Report) -> Html:
    found = predicted_points(report)
    if not found:
        none = tag("p", "No trial has both a stored prediction and a measurement.")
        return section("Predicted against measured", none, anchor="predicted")
    points = [
        Point(
            predicted=point.predicted,
            measured=point.measured,
            concurrency=point.concurrency,
            title=f"trial {point.trial} at concurrency {point.concurrency}: {point.label}; "
            f"predicted {point.predicted.median:.1f}, measured {point.measured:.1f} tok/s",
            is_baseline=point.is_baseline,
        )
        for point in found
    ]
    told = (
        "Each mark is one trial at one concurrency, a diamond the baseline; its line is the "
        f"predicted interval. {inside_text(found)}"
    )
    levels = sorted({p.concurrency for p in points})
    legend = tag(
        "div",
        *(
            tag("span", tag("span", class_="swatch", style=f"background:{point_color(index)}"),
                f"concurrency {level}")
            for index, level in enumerate(levels)
        ),
        class_="legend",
    )  # fmt: skip
    plot = tag("div", scatter(points, "tok/s"), class_="plot")
    return section(
        "Predicted against measured", tag("p", told, class_="soft"), legend, plot,
        anchor="predicted",
    )  # fmt: skip


def _importances(report: Report) -> Html:
    if not report.importances:
        none = tag("p", "Too little is measured to tell which knobs matter.")
        return section("What matters", none, anchor="importances")
    rows = []
    for item in report.importances:
        effect = "–"
        if item.effect is not None:
            low, high = 100 * item.effect.low, 100 * item.effect.high
            effect = f"{100 * item.effect.median:.1f} ({low:.1f}–{high:.1f})"
        tone = {"matters": "good", "cannot matter": "soft"}.get(item.verdict)
        best = "" if item.best_value is None else f"; best: {item.best_value}"
        rows.append(
            (tag("code", item.knob), tag("span", item.verdict, class_=tone), effect,
             item.reason + best)
        )  # fmt: skip
    told = (
        f"At concurrency {report.importance_level}: fastest against slowest value with the other "
        f"knobs equal, from what this study measured."
    )
    heads = ("knob", "verdict", "effect, % (90 %)", "why")
    return section(
        "What matters", tag("p", told, class_="soft"), table(heads, rows, (2,)),
        anchor="importances",
    )  # fmt: skip


def _settings(report: Report) -> Html:
    if not report.settings:
        none = tag("p", "The best configurations set no NCCL variable: NCCL's own choices hold.")
        return section("Effective settings", none, anchor="settings")
    tones = {"effective": "good", "not effective": "bad", "unknown": "warn"}
    rows = [
        (tag("code", s.name), tag("code", s.asked), s.found,
         tag("span", s.verdict, class_=tones.get(s.verdict)), s.reason)
        for s in report.settings
    ]  # fmt: skip
    heads = ("variable", "asked for", "in the workers", "verdict", "why")
    return section("Effective settings", table(heads, rows), anchor="settings")


def _failures(report: Report) -> Html:
    if not report.failures:
        return section("Failures", tag("p", "No trial failed."), anchor="failures")
    parts = []
    for failed in report.failures:
        failure = failed.failure
        line = f"trial {failed.number}: {failure.kind} at {failure.stage}: {failure.message}"
        parts.append(tag("p", line, Html("<br>"), tag("span", failed.label, class_="soft")))
        if failure.log_tail:
            tail = "\n".join(failure.log_tail.splitlines()[-_LOG_LINES:])
            parts.append(tag("details", tag("summary", "end of its log"), tag("pre", tail)))
    return section("Failures", *parts, anchor="failures")


def _health(report: Report) -> Html:
    notes = [
        tag("p", tag("span", finding.subject, class_="bad" if finding.severity == "error"
                     else "warn"), f": {finding.reason}. {finding.fix}")
        for finding in report.findings
    ]  # fmt: skip
    notes += [tag("p", line, class_="warn") for line in flagged(report)]
    if not notes:
        notes = [tag("p", "Clocks, throttling, acceptance and the repeats show nothing odd.")]
    return section("Health of the runs", *notes, anchor="health")


def _compared(report: Report) -> Html:
    if not report.compared:
        return Html("")
    return section(
        "Comparisons in turns",
        table(("A", "B", "answer"), compared_rows(report)),
        anchor="compared",
    )


def _next(report: Report) -> Html:
    parts: list[object] = []
    rows = [
        (str(level), lever_gain(lever), f"{100 * lever.gain.probability:.0f} %",
         f"{lever.name}: {lever.change}",
         "outside the space" if lever.in_space is False else "")
        for level, lever in next_steps(report)
    ]  # fmt: skip
    if rows:
        told = "What the calibrated model expects to be faster than the best configuration:"
        heads = ("concurrency", "predicted gain, % (90 %)", "P(faster)", "change", "note")
        parts += [tag("p", told), table(heads, rows, (0, 1, 2))]
    elif report.levels:
        parts.append(tag("p", "Nothing the model knows is expected to beat what was measured."))
    if report.headroom:
        summary = tag("summary", "How far each part is from its bound")
        parts.append(
            tag("details", summary, table(HEADROOM_HEADS, headroom_rows(report), (0, 2, 4)))
        )
    more = num_more(report)
    if more is not None:
        parts.append(tag("p", more))
    parts.append(tag("p", "Commands:"))
    parts.append(tag("pre", "\n".join(commands(report))))
    return section("What to try next", *parts, anchor="next")


def _provenance(report: Report) -> Html:
    rows = [(name, value) for name, value in provenance_rows(report)]
    return section("Provenance", table(("what", "value"), rows), anchor="provenance")
