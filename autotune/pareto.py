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
    #: trials of the front that beat it in every objective: the export may be one of those that
    #: repeats taken in turns prefer, though medians over all repeats do not
    beaten_by: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The front at one concurrency, best in the first metric first.

    The exported configuration is always among the points, and says so where it is beaten.
    """

    concurrency: int
    points: tuple[FrontPoint, ...]
    #: valid configurations that were compared
    num_compared: int

    @property
    def num_best(self) -> int:
        """Configurations that no other beats."""
        return sum(not point.beaten_by for point in self.points)


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
        best: list[str] = [
            knobs_id
            for knobs_id, score in scores.items()
            if not any(_dominates(other, score) for other in scores.values())
        ]
        exported = picked.get(level)
        shown = [*best, exported] if exported in scores and exported not in best else best
        shown.sort(key=lambda knobs_id: scores[knobs_id], reverse=True)
        trials = {one: _trial(history.by_knobs[one]) for one in shown}
        points = [
            _point(
                history,
                history.by_knobs[one],
                measured[one],
                one == exported,
                tuple(trials[other] for other in best if _dominates(scores[other], scores[one])),
            )
            for one in shown
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


def _trial(result: KnobsResult) -> int:
    """The trial that stands for knobs: their first complete one."""
    return next(trial.number for trial in result.trials if trial.state == "complete")


def _point(
    history: History,
    result: KnobsResult,
    metrics: Mapping[str, Summary],
    picked: bool,
    beaten_by: tuple[int, ...],
) -> FrontPoint:
    baseline = history.baseline
    return FrontPoint(
        trial=_trial(result),
        knobs_id=result.knobs.id,
        label=result.knobs.label(),
        metrics=metrics,
        is_baseline=baseline is not None and baseline.knobs.id == result.knobs.id,
        picked=picked,
        beaten_by=beaten_by,
    )
