"""What a study found, as a table for people and as plain values for programs."""

from typing import Any

from rich.table import Table

from autotune.outcome import LevelOutcome, Outcome
from autotune.statistics import Ratio, Summary
from model.spec import Interval


def outcome_table(outcome: Outcome) -> Table:
    """One row per concurrency."""
    unit = "tok/s" if outcome.metric.name == "tokens_per_s" else "ms"
    table = Table(title=f"study {outcome.study}", title_justify="left")
    table.add_column("concurrency", justify="right")
    table.add_column(f"baseline\n{unit} (95 % CI, n)", justify="right")
    table.add_column(f"best\n{unit} (95 % CI, n)", justify="right")
    table.add_column("speed-up\n× (95 % CI)", justify="right")
    table.add_column("noise floor\n%", justify="right")
    table.add_column("verdict")
    table.add_column("predicted\ntok/s (90 %)", justify="right")
    table.add_column("accept\nlength", justify="right")
    table.add_column("output")
    table.add_column("best knobs")
    for level in outcome.levels:
        predicted = None if level.predicted is None else level.predicted.tokens_per_s
        table.add_row(
            str(level.concurrency),
            _summary(level.baseline),
            _summary(level.best),
            _ratio(level.ratio),
            "–" if level.noise_floor is None else f"{100 * level.noise_floor:.1f}",
            _verdict(level),
            _interval(predicted),
            "–" if level.accept_length is None else f"{level.accept_length:.2f}",
            level.output_check,
            f"{level.knobs.label()} (trial {level.trial})",
        )
    return table


def outcome_mapping(outcome: Outcome) -> dict[str, Any]:
    """The same for ``--json``: plain values, units in the names."""
    return {
        "study": outcome.study,
        "metric": outcome.metric.name,
        "ended": outcome.ended,
        "verdict": outcome.verdict(),
        "num_search_trials": outcome.num_search_trials,
        "num_failed_trials": outcome.num_failed,
        "num_repeats": outcome.num_repeats,
        "levels": [_level_mapping(level) for level in outcome.levels],
    }


def _level_mapping(level: LevelOutcome) -> dict[str, Any]:
    ratio = level.ratio
    predicted = None if level.predicted is None else level.predicted.tokens_per_s
    return {
        "concurrency": level.concurrency,
        "knobs_id": level.knobs.id,
        "knobs": level.knobs.values(),
        "trial": level.trial,
        "best": _summary_mapping(level.best),
        "baseline_trial": level.baseline_trial,
        "baseline": _summary_mapping(level.baseline),
        "speedup": None
        if ratio is None
        else {"median": ratio.median, "low": ratio.low, "high": ratio.high, "n": ratio.num_pairs},
        "interleaved": level.interleaved,
        "verdict": level.verdict,
        "noise_floor": level.noise_floor,
        "output_check": level.output_check,
        "accept_length": level.accept_length,
        "predicted_tokens_per_s": None
        if predicted is None
        else {"median": predicted.median, "low": predicted.low, "high": predicted.high},
    }


def _summary_mapping(summary: Summary) -> dict[str, Any]:
    finite = summary.n > 1
    return {
        "median": summary.median,
        "low": summary.low if finite else None,
        "high": summary.high if finite else None,
        "n": summary.n,
        "drifts": summary.drifts,
        "bimodal": summary.bimodal,
    }


def _summary(summary: Summary) -> str:
    flags = [n for n, on in (("drifts", summary.drifts), ("bimodal", summary.bimodal)) if on]
    spread = f"{summary.low:.1f}–{summary.high:.1f}" if summary.n > 1 else "no interval"
    tail = f", {', '.join(flags)}" if flags else ""
    return f"{summary.median:.1f} ({spread}, n={summary.n}{tail})"


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f})"


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    return f"{interval.median:.1f} ({interval.low:.1f}–{interval.high:.1f})"


def _verdict(level: LevelOutcome) -> str:
    if level.ratio is None:
        return "baseline is best"
    return level.verdict if level.interleaved else f"{level.verdict} (not in turns)"
