"""The Markdown note of a trial and of a study, as the dashboard shows it."""

from collections.abc import Sequence

from autotune.dashboard.evidence import LevelEvidence, StudyEvidence, TrialEvidence
from autotune.digits import extent, significant
from autotune.outcome import Outcome
from autotune.records import Failure, Provenance
from autotune.statistics import Ratio, Summary
from model.spec import Interval

#: ends what we write; a reader's own words below it are kept
END_MARK = "*Written by autotune dashboard; notes of your own go below this line.*"
_LOG_LINES = 30
#: no-break spaces: neither trimmed by Markdown nor a place to break a line
_GAP = "\u00a0\u00a0\u00a0"
_ROLES = {
    "baseline": "baseline (speculation off)",
    "aa": "A/A pair: the baseline again",
    "search": "search",
    "replicate": "measured again",
    "final": "final comparison, in turns",
    "compare": "compared in turns (autotune compare)",
}


def trial_note(evidence: TrialEvidence, study: StudyEvidence) -> str:
    """Knobs, predicted against measured, time per term, output check, failure, provenance."""
    trial = evidence.trial
    parts = [
        f"### Trial {trial.number}: {trial.knobs.label()}",
        f"{_ROLES.get(trial.role, trial.role)} · {trial.state} · {_escape(trial.origin)} · "
        f"knobs `{trial.knobs.id}`",
    ]
    if evidence.failure is not None:
        parts.append(_failure(evidence.failure))
    if evidence.levels:
        parts += ["#### Throughput", _throughput(evidence, study)]
    for level in evidence.levels:
        if level.terms:
            parts += [f"#### Time per cycle at concurrency {level.concurrency}", _terms(level)]
    parts += ["#### Knobs", _knobs(evidence)]
    if evidence.provenance is not None:
        parts += ["#### Provenance", _provenance(evidence.provenance)]
    return "\n\n".join([*parts, END_MARK])


def study_note(study: StudyEvidence, outcome: Outcome | None) -> str:
    """What the study found so far."""
    parts = [f"### Study {study.view.name}"]
    if outcome is not None:
        parts.append(f"**{_escape(outcome.verdict())}** ({_escape(outcome.ended)})")
        rows = [
            [
                str(level.concurrency),
                _summary(level.baseline),
                f"{_summary(level.best)} (trial {level.trial})",
                _ratio(level.ratio),
                "–" if level.noise_floor is None else f"{100 * level.noise_floor:.1f} %",
                level.verdict,
                _escape(level.knobs_text()),
            ]
            for level in outcome.levels
        ]
        if rows:
            unit = "tok/s" if outcome.metric.name == "tokens_per_s" else "ms"
            heads = [
                "concurrency",
                f"baseline, {unit}",
                f"best, {unit}",
                "speed-up",
                "noise floor",
                "verdict",
                "best knobs",
            ]
            parts.append(_table(heads, rows, left=(5, 6)))
        parts.append(
            f"{outcome.num_search_trials} configurations measured, {outcome.num_failed} failed, "
            f"{outcome.num_repeats} repeats."
        )
    return "\n\n".join([*parts, END_MARK])


def merged(ours: str, stored: str) -> str | None:
    """The note to store: ours, a reader's words below the mark kept.

    None when the stored note is up to date, or is wholly the reader's.
    """
    if not stored.strip():
        return ours
    head, mark, own = stored.partition(END_MARK)
    if not mark:
        return None
    return None if head + mark == ours else ours + own


def _throughput(evidence: TrialEvidence, study: StudyEvidence) -> str:
    rows = []
    for level in evidence.levels:
        predicted, measured = level.predicted, level.tokens_per_s
        base = study.baseline(level.concurrency)
        rows.append(
            [
                str(level.concurrency),
                _interval(None if predicted is None else predicted.tokens_per_s),
                _summary(measured),
                _error(
                    None if predicted is None else predicted.tokens_per_s.median,
                    None if measured is None else measured.median,
                ),
                "–"
                if measured is None or base is None
                else f"{measured.median / base.median:.2f}×",
                _interval(None if predicted is None else predicted.accept_length, digits=3),
                "–" if level.accept_length is None else f"{level.accept_length:.2f}",
                level.output_check or "–",
            ]
        )
    heads = [
        "concurrency",
        "predicted tok/s (90 %)",
        "measured tok/s (95 % CI, n)",
        "prediction off by",
        "of baseline",
        "predicted accept length",
        "measured",
        "output",
    ]
    return _table(heads, rows, left=(7,))


def _terms(level: LevelEvidence) -> str:
    """Speed of light, predicted and measured ms of each term, then of the whole cycle."""
    predicted = level.predicted
    rows = []
    for name in level.terms:
        expected = None if predicted is None else predicted.terms_ms.get(name)
        bound = None if predicted is None else predicted.speed_of_light_ms.get(name)
        measured = level.term_ms(name)
        rows.append(
            [
                name,
                _number(bound),
                _interval(expected, digits=3),
                _number(measured),
                _error(None if expected is None else expected.median, measured),
                "–" if not bound or measured is None else f"{measured / bound:.1f}×",
            ]
        )
    cycle = None if predicted is None else predicted.cycle_ms
    rows.append(
        [
            "**cycle**",
            _number(sum(predicted.speed_of_light_ms.values()) if predicted else None),
            _interval(cycle, digits=3),
            _number(level.cycle_ms),
            _error(None if cycle is None else cycle.median, level.cycle_ms),
            "",
        ]
    )
    heads = [
        "term",
        "speed of light, ms",
        "predicted, ms (90 %)",
        "measured, ms",
        "prediction off by",
        "measured / bound",
    ]
    return _table(heads, rows, left=(0,))


def _knobs(evidence: TrialEvidence) -> str:
    values = evidence.trial.knobs.values()
    inert = {
        item.knob: item.reason
        for level in evidence.levels
        if level.predicted is not None
        for item in level.predicted.inert
    }
    rows = [
        [f"`{name}`", "auto" if value is None else str(value), _escape(inert.get(name, ""))]
        for name, value in values.items()
    ]
    if inert:
        return _table(["knob", "value", "inert here, because"], rows, left=(0, 1, 2))
    return _table(["knob", "value"], [row[:2] for row in rows], left=(0, 1))


def _failure(failure: Failure) -> str:
    text = f"**Failed: {failure.kind} at {failure.stage}:** {_escape(failure.message)}"
    lines = failure.log_tail.strip().splitlines()[-_LOG_LINES:]
    if not lines:
        return text
    # a fence longer than any in the log
    fence = "```" if not any("```" in line for line in lines) else "~~~~~"
    return "\n".join([text, "", fence, *lines, fence])


def _provenance(provenance: Provenance) -> str:
    dirty = {True: " (with uncommitted changes)", False: "", None: ""}[provenance.dirty]
    wanted = ("torch", "triton", "sglang", "vllm", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
    versions = [f"{n} {provenance.packages[n]}" for n in wanted if n in provenance.packages]
    nccl = sorted({rank.nccl_version for rank in provenance.ranks if rank.nccl_version})
    rows = [
        ("code", f"{(provenance.commit or 'unknown')[:12]}{dirty}"),
        ("config", provenance.config_hash),
        ("software", ", ".join([f"Python {provenance.python}", *versions])),
        ("GPUs", "; ".join(sorted(set(provenance.gpus))) + f" (×{len(provenance.gpus)})")
        if provenance.gpus
        else ("CPU", provenance.cpu or "unknown"),
        ("PCIe", "; ".join(sorted(set(provenance.pcie)))),
        ("driver", provenance.driver or ""),
        ("NCCL in the workers", ", ".join(nccl)),
        ("ranks", str(len(provenance.ranks) or "")),
        ("machine", provenance.machine_fingerprint),
    ]
    lines = [f"- {name}: {_escape(value)}" for name, value in rows if value]
    reasons: dict[str, list[str]] = {}
    for name, why in sorted(provenance.unknown.items()):
        reasons.setdefault(why, []).append(name)
    lines += [
        f"- unknown: {_escape(', '.join(names))} ({_escape(why)})" for why, names in reasons.items()
    ]
    return "\n".join(lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    # the dashboard sets columns edge to edge; a gap before a cell would indent its first line only
    rows = [[*(cell + _GAP for cell in row[:-1]), row[-1]] for row in rows]
    heads = [*(head + _GAP for head in heads[:-1]), heads[-1]]
    lines = [
        "| " + " | ".join(heads) + " |",
        "|" + "|".join(" :-- " if i in left else " --: " for i in range(len(heads))) + "|",
    ]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _escape(text: str) -> str:
    """One line that Markdown takes literally, in a table as well."""
    flat = " ".join(text.split())
    for mark in ("\\", "|", "*", "_", "`", "<", "["):
        flat = flat.replace(mark, "\\" + mark)
    return flat


def _number(value: float | None) -> str:
    return "–" if value is None else significant(value)


def _interval(interval: Interval | None, digits: int = 4) -> str:
    if interval is None:
        return "–"
    within = extent(interval.low, interval.high, digits)
    return f"{significant(interval.median, digits)} ({within})"


def _summary(summary: Summary | None) -> str:
    if summary is None:
        return "–"
    flags = [word for word, on in (("drifts", summary.drifts), ("bimodal", summary.bimodal)) if on]
    extra = "".join(f", {word}" for word in flags)
    median = significant(summary.median, 4)
    if summary.n < 2:
        return f"{median} (n {summary.n})"
    return f"{median} ({extent(summary.low, summary.high, 4)}, n {summary.n}{extra})"


def _ratio(ratio: Ratio | None) -> str:
    return "–" if ratio is None else f"{ratio.median:.3f}× ({ratio.low:.3f}–{ratio.high:.3f})"


def _error(predicted: float | None, measured: float | None) -> str:
    if predicted is None or not measured:
        return "–"
    return f"{100 * (predicted / measured - 1):+.0f} %"
