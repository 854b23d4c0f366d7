"""How much faster other knobs are predicted to be, with what two predictions share cancelled.

Two knobs on one machine share their constants, the acceptance and the host's mode; only what
differs between them is uncertain. Drawn from: the constants' covariance (linearised as in
``model.predictor``), the acceptance posterior, the host's two modes, and the residual of the terms
that differ. Suffixes: S draws, U knobs, K constants.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.many import DELTA, probes
from model.predictor import Predictor
from model.spec import Interval, Knobs, Workload
from model.step import SUB_TERMS, StepRows

Array = NDArray[Any]

_SEED = 20250102


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Other knobs against a base, at one workload."""

    knobs: Knobs
    #: tokens/s of the other over the base
    ratio: Interval
    #: cycle of the other minus the base's, ms
    cycle_change_ms: Interval
    #: accept length of the other over the base's
    accept_ratio: Interval
    #: probability that the other is faster, by the model
    probability: float
    #: the model sees no difference at all
    same: bool


def gains(
    predictor: Predictor, base: Knobs, others: Sequence[Knobs], workload: Workload
) -> list[Gain]:
    """Predicted gain of each of ``others`` over ``base``.

    Raises ``ValueError`` where speculation has no draft shape.
    """
    if not others:
        return []
    everything = [base, *others]
    if predictor.draft is None and any(k.method != "off" for k in everything):
        raise ValueError("speculation needs a draft model")
    tau_US = np.stack([_accept_lengths(predictor, k) for k in everything])
    cycle_US = _cycles(predictor, everything, [workload] * len(everything), tau_US.shape[1])
    ratio_US = (tau_US / tau_US[0]) * (cycle_US[0] / cycle_US)
    change_US = cycle_US - cycle_US[0]
    found = []
    for index, knobs in enumerate(others, start=1):
        same = bool(np.ptp(ratio_US[index]) < 1e-9 and abs(ratio_US[index, 0] - 1.0) < 1e-9)
        found.append(
            Gain(
                knobs=knobs,
                ratio=_interval(ratio_US[index]),
                cycle_change_ms=_interval(change_US[index]),
                accept_ratio=_interval(tau_US[index] / tau_US[0]),
                probability=float((ratio_US[index] > 1.0).mean()),
                same=same,
            )
        )
    return found


def step_ratio(
    predictor: Predictor, first: tuple[Knobs, Workload], second: tuple[Knobs, Workload]
) -> tuple[Interval, Interval]:
    """(tokens/s, cycle time) of ``second`` over ``first``; each with its own workload."""
    pairs = [first, second]
    tau_US = np.stack([_accept_lengths(predictor, knobs) for knobs, _ in pairs])
    cycle_US = _cycles(predictor, [k for k, _ in pairs], [w for _, w in pairs], tau_US.shape[1])
    requests = second[1].concurrency / first[1].concurrency
    cycle = cycle_US[1] / cycle_US[0]
    return _interval(requests * tau_US[1] / tau_US[0] / cycle), _interval(cycle)


def _accept_lengths(predictor: Predictor, knobs: Knobs) -> Array:
    samples_S = predictor.acceptance.samples
    if knobs.method == "off":
        return np.ones(len(samples_S))
    return predictor.acceptance.accept_length_samples(knobs.steps, knobs.topk, knobs.draft_tokens)


def _cycles(
    predictor: Predictor, knobs: Sequence[Knobs], workloads: Sequence[Workload], num_draws: int
) -> Array:
    """Cycle times drawn jointly, ms [U, S]: row 0 is what the others are compared with."""
    calibration = predictor.calibration
    rows = StepRows.of(list(knobs), list(workloads))
    num = len(calibration.names) + 1
    rng = np.random.default_rng(_SEED)
    root_KK = np.linalg.cholesky(calibration.covariance + 1e-14 * np.eye(num - 1))
    normal_SK = rng.standard_normal((num_draws, num - 1)) @ root_KK.T
    slow_S = rng.random(num_draws) < calibration["host_slow_share"]
    cycles = []
    for slow in (False, True):
        terms = predictor.step.terms_ms(rows, probes(calibration), slow)
        cycles.append(_drawn(terms, num, len(knobs), normal_SK, calibration["discrepancy"]))
    drawn: Array = np.where(slow_S, cycles[1], cycles[0])
    return drawn


def _drawn(
    terms: Mapping[str, Array], num: int, width: int, normal_SK: Array, discrepancy: float
) -> Array:
    """Sum of the terms under drawn constants and residuals, [U, S]."""
    rng = np.random.default_rng(_SEED + 1)
    total_US = np.zeros((width, len(normal_SK)))
    for name in sorted(terms):
        values_DU = np.broadcast_to(terms[name], (num, width))
        base_U = np.maximum(values_DU[0], 1e-12)
        gradient_KU = (values_DU[1:] / base_U - 1.0) / DELTA
        # what the formulas leave out: alike where the term is alike, free where it changes
        common_S = rng.standard_normal(len(normal_SK))
        own_US = rng.standard_normal((width, len(normal_SK)))
        differs_U = np.clip(np.abs(np.log(base_U / base_U[0])), 0.0, 1.0)
        # the term's share of the residual of a whole cycle
        residual_US = discrepancy * (
            np.sqrt(1.0 - differs_U**2)[:, None] * common_S + differs_U[:, None] * own_US
        )
        log_US = (normal_SK @ gradient_KU).T + residual_US
        total_US += np.where(
            values_DU[0][:, None] > 0, base_U[:, None] * np.exp(np.clip(log_US, -3.0, 3.0)), 0.0
        )
    return total_US


def source_name(term: str) -> str:
    """Term of ``model.spec`` -> its name in ``StepModel.terms_ms``."""
    head, _, sub = term.partition(".")
    return f"target.{sub}" if sub in SUB_TERMS else head


def _interval(values_S: Array) -> Interval:
    low, median, high = np.quantile(values_S, [0.05, 0.5, 0.95])
    return Interval(float(median), float(low), float(high))
