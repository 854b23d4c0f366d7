"""What speculation needs where the verify and the plain step were measured on the host itself.

A chain of k steps takes the measured verify, moved by the predicted difference between k + 1 and
the measured number of tokens, plus the predicted rest of the cycle (draft, extend, sampling, host
gaps). It pays when accept length > cycle / plain step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.predictor import Predictor
from model.spec import Interval, Knobs, Workload

_Z90 = 1.6449
#: further from the prediction than any host that was ever measured, and near a slip of units
_FAR = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainNeeds:
    """A chain of ``steps`` at one concurrency; times in ms, intervals of 90 %."""

    steps: int
    #: the measured time, or moved from it to this number of tokens
    verify_ms: float
    #: draft, extend, sampling and host gaps, predicted
    rest_ms: Interval
    cycle_ms: Interval
    #: accept length above which the chain beats plain decoding
    needed: Interval
    #: no chain of these steps can accept more
    most: int
    accept_length: Interval
    #: all requests together
    tokens_per_s: Interval
    #: chance that the chain beats the plain step
    p_pays: float


def chain_needs(
    predictor: Predictor,
    knobs: Knobs,
    workload: Workload,
    *,
    plain_step_ms: float,
    verify_ms: float,
    steps: Sequence[int],
) -> tuple[ChainNeeds, ...]:
    """Chains of several depths, given the verify of ``knobs`` (a chain) and the plain step, in ms.

    Raises ``ValueError`` for times that are not positive and knobs that are not a chain.
    """
    if knobs.method == "off" or knobs.topk != 1:
        raise ValueError("the measured verify must be that of a chain: speculation.topk 1")
    for name, value in (("plain step", plain_step_ms), ("verify", verify_ms)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} of {value!r} ms: it must be positive and finite")
    base = predictor.verify_ms(knobs, workload).median
    found = []
    for depth in steps:
        chain = Knobs.of(
            {
                **knobs.values(),
                "speculation.steps": depth,
                "speculation.draft_tokens": depth + 1,
            }
        )
        moved = max(verify_ms + (predictor.verify_ms(chain, workload).median - base), 0.0)
        found.append(_needs(predictor, chain, workload, plain_step_ms, moved))
    return tuple(found)


def doubts(
    predictor: Predictor,
    knobs: Knobs,
    workload: Workload,
    *,
    plain_step_ms: float,
    verify_ms: Sequence[float],
) -> tuple[str, ...]:
    """A sentence for each measured time that is so far from its prediction that a unit may be off.

    ``knobs``: the chain of the measured verifies; times in ms, positive.
    """
    plain = Knobs.of({**knobs.values(), "speculation.method": "off"})
    given = [("plain step", plain, plain_step_ms)] + [("verify", knobs, ms) for ms in verify_ms]
    found = []
    for name, run, measured_ms in given:
        predicted_ms = predictor.verify_ms(run, workload).median
        factor = max(measured_ms / predicted_ms, predicted_ms / measured_ms)
        if factor > _FAR:
            side = "longer" if measured_ms > predicted_ms else "shorter"
            found.append(
                f"{name} of {measured_ms:.10g} ms is {factor:.0f} times {side} than the predicted "
                f"{predicted_ms:.3g} ms: is its unit right?"
            )
    return tuple(found)


def _needs(
    predictor: Predictor, chain: Knobs, workload: Workload, plain_step_ms: float, verify_ms: float
) -> ChainNeeds:
    terms = predictor.predict(chain, workload).terms_ms
    rest = _sum(term for name, term in terms.items() if not name.startswith("verify."))
    tau_S = predictor.acceptance.at(workload.concurrency).accept_length_samples(
        chain.steps, 1, chain.steps + 1
    )
    cycle_S = verify_ms + _draws(rest, len(tau_S))
    ratio_S = tau_S / cycle_S
    return ChainNeeds(
        steps=chain.steps,
        verify_ms=verify_ms,
        rest_ms=rest,
        cycle_ms=_interval(cycle_S),
        needed=_interval(cycle_S / plain_step_ms),
        most=chain.steps + 1,
        accept_length=_interval(tau_S),
        tokens_per_s=_interval(1e3 * workload.concurrency * ratio_S),
        p_pays=float(np.mean(ratio_S * plain_step_ms > 1.0)),
    )


def _sum(terms: Iterable[Interval]) -> Interval:
    """Sum of log-normal terms with independent errors, as a log-normal interval."""
    parts = list(terms)
    total = sum(part.median for part in parts)
    variance = sum(
        (part.median * np.log(part.high / part.low) / (2 * _Z90)) ** 2
        for part in parts
        if part.low > 0
    )
    spread = float(np.exp(_Z90 * np.sqrt(variance) / total))
    return Interval(total, total / spread, total * spread)


def _draws(value: Interval, count: int) -> NDArray[np.float64]:
    """[count] values of a log-normal interval, at equal steps of probability, shuffled."""
    from scipy.stats import norm

    middle = (np.arange(count) + 0.5) / count
    sd = np.log(value.high / value.low) / (2 * _Z90)
    drawn: NDArray[np.float64] = value.median * np.exp(sd * norm.ppf(middle))
    np.random.default_rng(0).shuffle(drawn)
    return drawn


def _interval(values_S: NDArray[np.float64]) -> Interval:
    low, median, high = (float(v) for v in np.quantile(values_S, [0.05, 0.5, 0.95]))
    return Interval(median, low, high)
