"""Several objectives: the configurations that no other beats in every metric.

Optuna keeps one objective per metric and concurrency, and calls the undominated trials its best. A
schedule picks knobs per concurrency, so a front is taken at each: with one concurrency it is
Optuna's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.history import History, KnobsResult
from autotune.schemas import Study
from autotune.statistics import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """One undominated configuration."""

    trial: int
    knobs_id: str
    label: str
    #: metric -> median and interval, in the order of the study file
    metrics: Mapping[str, Summary]
    is_baseline: bool
    #: whether it is the one that is exported
    picked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The front at one concurrency, best in the first metric first."""

    concurrency: int
    points: tuple[FrontPoint, ...]
    #: valid configurations that were compared
    num_compared: int


def fronts(history: History, study: Study, picked: Mapping[int, str]) -> tuple[Front, ...]:
    """One front per concurrency; none for a study with one metric or weighted levels.

    ``picked``: concurrency -> knobs id that is exported.
    """
    metrics = study.objective.metrics
    if len(metrics) < 2 or study.objective.weights is not None:
        return ()
    signs = {name: 1.0 if direction == "maximize" else -1.0 for name, direction in metrics}
    found = []
    for level in study.workload.concurrency:
        measured = _measured(history, study, level, tuple(signs))
        scores = {
            knobs_id: tuple(sign * summaries[name].median for name, sign in signs.items())
            for knobs_id, summaries in measured.items()
        }
        best = [
            knobs_id
            for knobs_id, score in scores.items()
            if not any(_dominates(other, score) for other in scores.values())
        ]
        best.sort(key=lambda knobs_id: scores[knobs_id], reverse=True)
        points = [
            _point(history, history.by_knobs[one], measured[one], picked.get(level)) for one in best
        ]
        found.append(Front(concurrency=level, points=tuple(points), num_compared=len(measured)))
    return tuple(found)


def _measured(
    history: History, study: Study, level: int, names: Sequence[str]
) -> dict[str, dict[str, Summary]]:
    """Knobs id -> summaries of every metric, for knobs that may win."""
    found: dict[str, dict[str, Summary]] = {}
    for knobs_id, result in history.by_knobs.items():
        if not result.complete((level,)):
            continue
        if study.constraints.lossless and result.output_check(level) == "incorrect":
            continue
        summaries = {name: result.summary(level, name) for name in names}
        known = {name: one for name, one in summaries.items() if one is not None}
        if len(known) == len(names):
            found[knobs_id] = known
    return found


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """At least as good everywhere, and better somewhere (larger is better)."""
    pairs = list(zip(one, other, strict=True))
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def _point(
    history: History, result: KnobsResult, metrics: Mapping[str, Summary], picked: str | None
) -> FrontPoint:
    complete = [trial for trial in result.trials if trial.state == "complete"]
    baseline = history.baseline
    return FrontPoint(
        trial=complete[0].number,
        knobs_id=result.knobs.id,
        label=result.knobs.label(),
        metrics=metrics,
        is_baseline=baseline is not None and baseline.knobs.id == result.knobs.id,
        picked=result.knobs.id == picked,
    )
