"""Joint draws of what several knobs take: what two predictions share cancels in their difference.

Two knobs on one machine share their constants, the acceptance and the host's mode; only what
differs between them is uncertain. Drawn from: the constants' covariance, the acceptance posterior,
the host's two modes, and the residual of the terms that differ. The model is evaluated at the drawn
constants, because a step that its launches bind in one draw is bound by its device in another. A
draw depends on the knobs and the workload alone, not on what else is asked for, so that results of
separate calls can be compared. Suffixes: S draws, U knobs, K constants.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.constants import as_mapping
from model.predictor import Predictor
from model.spec import Interval, Knobs, Workload
from model.step_columns import StepRows

Array = NDArray[Any]

_SEED = 20250102
#: draws of the constants for each sample of the acceptance
_PER_SAMPLE = 4


def term_draws(
    predictor: Predictor,
    knobs: Sequence[Knobs],
    workloads: Sequence[Workload],
    per_sample: int = _PER_SAMPLE,
) -> Mapping[str, Array]:
    """Terms of ``StepModel.terms_ms``, ms [U, S], drawn jointly; all are 0 or more.

    ``per_sample``: draws of the constants for each sample of the acceptance.
    """
    calibration = predictor.calibration
    num_draws = per_sample * len(predictor.acceptance.samples)
    rows = StepRows.of(list(knobs), list(workloads))
    num = len(calibration.names)
    rng = np.random.default_rng(_SEED)
    root_KK = np.linalg.cholesky(calibration.covariance + 1e-14 * np.eye(num))
    moves_SK = rng.standard_normal((num_draws, num)) @ root_KK.T
    slow_S = rng.random(num_draws) < calibration["host_slow_share"]
    drawn: dict[str, Array] = {}
    for slow in (False, True):
        index = np.flatnonzero(slow_S == slow)
        constants = as_mapping(calibration.constants, calibration.x + moves_SK[index])
        for name, values in predictor.step.terms_ms(rows, constants, slow).items():
            shape = (len(knobs), num_draws)
            drawn.setdefault(name, np.zeros(shape))[:, index] = np.broadcast_to(
                values, (index.size, len(knobs))
            ).T
    middle = predictor.step.terms_ms(
        rows, as_mapping(calibration.constants, calibration.x[None]), False
    )
    residual = np.random.default_rng(_SEED + 1)
    for name in sorted(drawn):
        base_U = np.maximum(np.broadcast_to(middle[name], (1, len(knobs)))[0], 1e-12)
        moved_US = _residual(np.log(base_U / base_U[0]), num_draws, residual)
        drawn[name] *= np.exp(calibration["discrepancy"] * moved_US)
    return drawn


def cycle_draws(
    predictor: Predictor,
    knobs: Sequence[Knobs],
    workloads: Sequence[Workload],
    per_sample: int = _PER_SAMPLE,
) -> Array:
    """Cycle (or plain step) of each knobs, ms [U, S]; ``per_sample`` as in ``term_draws``."""
    terms = term_draws(predictor, knobs, workloads, per_sample)
    total: Array = np.sum(np.stack(list(terms.values())), axis=0)
    return total


def accept_length_draws(predictor: Predictor, knobs: Knobs, workload: Workload) -> Array:
    """Accept length of one knobs on a load's prompts, [S]: 1 without speculation."""
    if knobs.method == "off":
        return np.ones(_PER_SAMPLE * len(predictor.acceptance.samples))
    tree = (knobs.steps, knobs.topk, knobs.draft_tokens)
    model = predictor.acceptance.at(workload.concurrency)
    return np.tile(model.accept_length_samples(*tree), _PER_SAMPLE)


def tokens_per_cycle_draws(predictor: Predictor, knobs: Knobs, workload: Workload) -> Array:
    """Tokens of a cycle and request as a whole measurement counts them, [S].

    The accept length, less what a batch loses that ends with its slowest request (``model.wave``).
    """
    tau_S = accept_length_draws(predictor, knobs, workload)
    kept = predictor.batch(knobs, workload).log_tau - float(np.log(tau_S).mean())
    result: Array = tau_S * np.exp(kept)
    return result


def interval(values_S: Array) -> Interval:
    """Median and 90 % interval of draws."""
    low, median, high = np.quantile(values_S, [0.05, 0.5, 0.95])
    return Interval(float(median), float(low), float(high))


def most_saved(draws_US: Array, own: int) -> Array:
    """Time of ``own`` minus that of the fastest in each draw, [S]: never below 0.

    Which one is fastest is uncertain too, so this is the most that a choice among them can save:
    at least as much, at every quantile, as any single one saves.
    """
    saved: Array = draws_US[own] - draws_US.min(axis=0)
    return saved


def spread(draws_US: Array) -> Array:
    """Slowest minus fastest in each draw, [S]: never below 0."""
    result: Array = draws_US.max(axis=0) - draws_US.min(axis=0)
    return result


def _residual(moved_U: Array, num_draws: int, rng: np.random.Generator) -> Array:
    """What the formulas leave out of a term, in sd, [U, S].

    Alike where the term is as long as the first one's, free where it is another: ``moved_U`` is
    its log ratio to the first. Equal terms have equal residuals, whoever else is asked for.
    """
    common_S, longer_S, shorter_S = rng.standard_normal((3, num_draws))
    differs_U = np.clip(np.abs(moved_U), 0.0, 1.0)[:, None]
    other_US = np.where(moved_U[:, None] > 0, longer_S, shorter_S)
    result: Array = np.sqrt(1.0 - differs_U**2) * common_S + differs_U * other_US
    return result
