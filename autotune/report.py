"""What a study found, as a table for people and as plain values for programs."""

from typing import Any

from rich.console import Console
from rich.table import Table

from autotune.outcome import LevelOutcome, Outcome
from autotune.pareto import Front, FrontPoint
from autotune.statistics import Ratio, Summary
from model.spec import Interval

#: objectives of a study file with their unit
METRIC_NAMES = {"tokens_per_s": "tok/s", "ttft_ms": "TTFT, ms", "tpot_ms": "TPOT, ms"}


def show_outcome(outcome: Outcome, screen: Console) -> None:
    """Table by concurrency, what was chosen there, and the verdict; fits 100 columns."""
    screen.print(outcome_table(outcome))
    for level in outcome.levels:
        for line in level_lines(level, outcome):
            screen.print(line, soft_wrap=True, markup=False)
    for front in outcome.fronts:
        screen.print(front_table(front))
    if outcome.fronts:
        screen.print(front_pick(outcome), soft_wrap=True, markup=False)
    screen.print(f"{outcome.ended}; {outcome.verdict()}.", soft_wrap=True, markup=False)


def front_table(front: Front) -> Table:
    """Undominated configurations at one concurrency."""
    heads, rows = front_rows(front)
    table = Table(title=front_title(front), title_justify="left", box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head == "configuration" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def front_title(front: Front) -> str:
    """How many of how many are on the front."""
    return (
        f"Pareto front at concurrency {front.concurrency}: {front.num_best} of "
        f"{front.num_compared} configurations are beaten by no other in every objective"
    )


def front_rows(front: Front) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a front, best in the first objective first."""
    names = list(front.points[0].metrics) if front.points else []
    heads = ["", "trial", *(f"{METRIC_NAMES[name]} (95 % CI, n)" for name in names)]
    rows = [
        [
            _picked(point),
            str(point.trial),
            *(_summary(point.metrics[name]) for name in names),
            "plain decoding, the baseline" if point.is_baseline else point.label,
        ]
        for point in front.points
    ]
    return [*heads, "configuration"], rows


def _picked(point: FrontPoint) -> str:
    if not point.beaten_by:
        return "picked" if point.picked else ""
    return f"picked; trial {', '.join(map(str, point.beaten_by))} beats its medians"


def front_pick(outcome: Outcome) -> str:
    """How the exported configuration is picked from the fronts, and how to pick another."""
    goal = outcome.metric
    most = "highest" if goal.maximize else "lowest"
    return (
        f"picked for export: the first objective decides, the {most} {METRIC_NAMES[goal.name]} if "
        f"it is shown to beat the baseline; for another trial of the front: "
        f"autotune study best {outcome.study} --trial N"
    )


def outcome_table(outcome: Outcome) -> Table:
    """One row per concurrency."""
    unit = "tok/s" if outcome.metric.name == "tokens_per_s" else "ms"
    table = Table(title=f"study {outcome.study}", title_justify="left", box=None, pad_edge=False)
    table.add_column("c", justify="right")
    table.add_column(f"baseline, {unit}\n(95 % CI, n)", justify="right")
    table.add_column(f"best, {unit}\n(95 % CI, n)", justify="right")
    table.add_column("speed-up, ×\n(95 % CI)", justify="right")
    table.add_column("noise floor\n%", justify="right")
    table.add_column("verdict")
    table.add_column("accept\nlength", justify="right")
    for level in outcome.levels:
        alone = level.ratio is None
        table.add_row(
            str(level.concurrency),
            _summary(level.baseline),
            "–" if alone else _summary(level.best),
            _ratio(level.ratio),
            "–" if level.noise_floor is None else f"{100 * level.noise_floor:.1f}",
            verdict_text(level, outcome),
            "–"
            if level.accept_length is None or level.knobs.method == "off"
            else f"{level.accept_length:.2f}",
        )
    return table


def level_lines(level: LevelOutcome, outcome: Outcome) -> list[str]:
    """What stands behind a row: knobs, output check, prediction, flags of the repeats."""
    if level.ratio is None:
        lines = []
    else:
        predicted = None if level.predicted is None else level.predicted.tokens_per_s
        told = "" if predicted is None else f"; predicted {_interval(predicted)} tok/s (90 %)"
        lines = [
            f"c={level.concurrency}: best is trial {level.trial}: {level.knobs_text()}; output "
            f"{level.output_check}{told}"
        ]
    for name, summary in (("baseline", level.baseline), ("best", level.best)):
        if summary.flags and not (name == "best" and level.ratio is None):
            flags = ", ".join(summary.flags)
            lines.append(f"c={level.concurrency}: the {name}'s repeats: {flags}")
    return lines


def verdict_text(level: LevelOutcome, outcome: Outcome) -> str:
    """The verdict of a level in a few words."""
    if level.ratio is None:
        if outcome.num_alternatives == 0:
            return "baseline only"
        return "baseline is best"
    return level.verdict if level.interleaved else f"{level.verdict} (not in turns)"


def outcome_mapping(outcome: Outcome) -> dict[str, Any]:
    """The same for ``--json``: plain values, units in the names."""
    return {
        "study": outcome.study,
        "metric": outcome.metric.name,
        "ended": outcome.ended,
        "verdict": outcome.verdict(),
        "num_search_trials": outcome.num_search_trials,
        "num_alternatives": outcome.num_alternatives,
        "num_failed_trials": outcome.num_failed,
        "num_repeats": outcome.num_repeats,
        "levels": [_level_mapping(level) for level in outcome.levels],
        "pareto_fronts": [_front_mapping(front) for front in outcome.fronts],
    }


def _front_mapping(front: Front) -> dict[str, Any]:
    return {
        "concurrency": front.concurrency,
        "num_compared": front.num_compared,
        "points": [
            {
                "trial": point.trial,
                "knobs_id": point.knobs_id,
                "label": point.label,
                "metrics": {n: _summary_mapping(one) for n, one in point.metrics.items()},
                "is_baseline": point.is_baseline,
                "picked": point.picked,
                "beaten_by": list(point.beaten_by),
            }
            for point in front.points
        ],
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
        "num_warm_up": summary.num_warm_up,
    }


def _summary(summary: Summary) -> str:
    spread = f"{summary.low:.1f}–{summary.high:.1f}" if summary.n > 1 else "no interval"
    return f"{summary.median:.1f} ({spread}, n={summary.n})"


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f})"


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    return f"{interval.median:.1f} ({interval.low:.1f}–{interval.high:.1f})"
