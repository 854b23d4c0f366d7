"""How much faster other knobs are predicted to be, with what two predictions share cancelled."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.draws import accept_length_draws, cycle_draws, interval, tokens_per_cycle_draws
from model.predictor import Predictor
from model.spec import Interval, Knobs, Workload
from model.step import SUB_TERMS


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
    tau_US = np.stack([accept_length_draws(predictor, k, workload) for k in everything])
    made_US = np.stack([tokens_per_cycle_draws(predictor, k, workload) for k in everything])
    cycle_US = cycle_draws(predictor, everything, [workload] * len(everything))
    ratio_US = (made_US / made_US[0]) * (cycle_US[0] / cycle_US)
    change_US = cycle_US - cycle_US[0]
    found = []
    for index, knobs in enumerate(others, start=1):
        same = bool(np.ptp(ratio_US[index]) < 1e-9 and abs(ratio_US[index, 0] - 1.0) < 1e-9)
        found.append(
            Gain(
                knobs=knobs,
                ratio=interval(ratio_US[index]),
                cycle_change_ms=interval(change_US[index]),
                accept_ratio=interval(tau_US[index] / tau_US[0]),
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
    tau_US = np.stack([tokens_per_cycle_draws(predictor, k, w) for k, w in pairs])
    cycle_US = cycle_draws(predictor, [k for k, _ in pairs], [w for _, w in pairs])
    requests = second[1].concurrency / first[1].concurrency
    cycle = cycle_US[1] / cycle_US[0]
    return interval(requests * tau_US[1] / tau_US[0] / cycle), interval(cycle)


def source_name(term: str) -> str:
    """Term of ``model.spec`` -> its name in ``StepModel.terms_ms``."""
    head, _, sub = term.partition(".")
    return f"target.{sub}" if sub in SUB_TERMS else head
