"""A trial's repeats as the objectives that Optuna keeps."""

import math
import statistics

from autotune.history import History
from autotune.schemas import Study


def objective_values(history: History, study: Study, trial_id: int) -> list[float] | None:
    """Medians in the order of ``ledger.objective_names``; None when one is missing.

    With weights: the weighted mean of ln(value / baseline), turned so that more is better, as a
    ratio.
    """
    levels = study.workload.concurrency
    medians: dict[tuple[str, int], float] = {}
    for metric, _ in study.objective.metrics:
        for level in levels:
            values = history.trial_values(trial_id, level, metric)
            # a final comparison measures only the levels that its knobs won
            values = values or history.result_of(trial_id).values(level, metric)
            if not values:
                return None
            medians[metric, level] = statistics.median(values)
    weights = study.objective.weights
    if weights is None:
        return [medians[metric, level] for metric, _ in study.objective.metrics for level in levels]
    baseline = history.baseline
    total, gain = 0.0, 0.0
    for metric, direction in study.objective.metrics:
        for level in levels:
            reference = None if baseline is None else baseline.summary(level, metric)
            # the baseline itself, while it is being finished, is its own reference
            centre = medians[metric, level] if reference is None else reference.median
            turned = 1.0 if direction == "maximize" else -1.0
            gain += turned * weights[level] * math.log(medians[metric, level] / centre)
            total += weights[level]
    return [math.exp(gain / total)]


def level_weights(study: Study) -> dict[int, float]:
    """Concurrency -> share of the objective; equal shares unless the study weighs them."""
    levels = study.workload.concurrency
    weights = study.objective.weights or dict.fromkeys(levels, 1.0)
    total = sum(weights.values())
    return {level: weights[level] / total for level in levels}
