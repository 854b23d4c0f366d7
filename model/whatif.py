"""Questions around a prediction: what would speculation need, and how much can settings change?

Break-even: speculation pays when accept length > cycle time / plain step time. Everything is per
concurrency, at the predictor's medians, with intervals where the answer is a prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.draws import (
    cycle_draws,
    interval,
    most_saved,
    spread,
    term_draws,
    tokens_per_cycle_draws,
)
from model.predictor import Predictor
from model.spec import Interval, Knobs, Scalar, Workload

#: NCCL settings people try; every possible combination is compared
NCCL_CHOICES: dict[str, tuple[Scalar | None, ...]] = {
    "nccl.algo": ("auto", "ring", "tree"),
    "nccl.proto": ("auto", "LL", "LL128", "Simple"),
    "nccl.min_channels": (None, 2, 4, 8, 16),
    "nccl.max_channels": (None, 1, 4, 16),
    "nccl.p2p_level": ("auto", "PIX", "PHB", "SYS"),
}


#: of them, those that are unset by None and not by "auto"
_NUMBERS = ("nccl.min_channels", "nccl.max_channels", "nccl.buffsize", "nccl.nthreads")


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """What speculation needs at one concurrency; times in ms."""

    concurrency: int
    plain_step_ms: float
    cycle_ms: float
    verify_ms: float
    accept_length: Interval
    #: accept length above which these knobs beat plain decoding
    accept_length_needed: float
    #: most that the verify may take for these knobs to beat plain decoding; negative: never
    verify_ms_allowed: float
    speedup: Interval


def plain(knobs: Knobs) -> Knobs:
    """The same knobs with speculation off; a server that captures the verify captures that too."""
    captured = knobs.graph_decode or (knobs.method != "off" and knobs.graph_verify)
    changed: dict[str, Scalar | None] = {
        "speculation.method": "off",
        "cuda_graph.decode": captured,
    }
    return Knobs.of({**knobs.values(), **changed})


def break_even(predictor: Predictor, knobs: Knobs, workload: Workload) -> BreakEven:
    """Break-even of speculative knobs; raises ``ValueError`` for plain ones."""
    if knobs.method == "off":
        raise ValueError("break-even needs knobs with speculation on")
    off = predictor.predict(plain(knobs), workload)
    spec = predictor.predict(knobs, workload)
    verify = sum(v.median for name, v in spec.terms_ms.items() if name.startswith("verify."))
    rest = spec.cycle_ms.median - verify
    return BreakEven(
        concurrency=workload.concurrency,
        plain_step_ms=off.cycle_ms.median,
        cycle_ms=spec.cycle_ms.median,
        verify_ms=verify,
        accept_length=spec.accept_length,
        accept_length_needed=spec.cycle_ms.median / off.cycle_ms.median,
        verify_ms_allowed=spec.accept_length.median * off.cycle_ms.median - rest,
        speedup=interval(speedups(predictor, knobs, workload)),
    )


def speedups(
    predictor: Predictor,
    knobs: Knobs,
    workload: Workload,
    *,
    plain_step_ms: float | None = None,
    cycle_ms: float | None = None,
    accept_length: float | None = None,
) -> NDArray[Any]:
    """Tokens/s of speculative knobs over plain decoding, drawn [S]; what was measured is given."""
    cycles_US = cycle_draws(predictor, [knobs, plain(knobs)], [workload] * 2)
    cycle_S = cycles_US[0] if cycle_ms is None else cycle_ms
    step_S = cycles_US[1] if plain_step_ms is None else plain_step_ms
    tau_S: NDArray[Any] | float = (
        tokens_per_cycle_draws(predictor, knobs, workload)
        if accept_length is None
        else accept_length
    )
    return np.broadcast_to(tau_S * step_S / cycle_S, cycles_US[0].shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsRange:
    """All-reduce time of a step over all NCCL settings that can run, ms."""

    default_ms: Interval
    best_ms: Interval
    worst_ms: Interval
    best: Knobs
    worst: Knobs
    #: NCCL's own choice minus the best: the most that tuning can save, 0 or more
    saved_ms: Interval
    #: the settings that the knobs carry minus the best, 0 or more
    saved_from_own_ms: Interval
    #: worst minus best: the most that settings can explain at all
    swing_ms: Interval
    num_settings: int
    #: settings that do not change any all-reduce of this step
    num_inert: int


def nccl_range(
    predictor: Predictor,
    knobs: Knobs,
    workload: Workload,
    choices: dict[str, tuple[Scalar | None, ...]] | None = None,
) -> SettingsRange:
    """The most that NCCL settings can change in one step of these knobs."""
    names = list(choices or NCCL_CHOICES)
    candidates = [
        made
        for values in product(*((choices or NCCL_CHOICES)[name] for name in names))
        if (made := _made(knobs, dict(zip(names, values, strict=True)))) is not None
    ]
    unset = {n: None if n in _NUMBERS else "auto" for n in knobs.values() if n.startswith("nccl.")}
    base = Knobs.of({**knobs.values(), **unset})
    runnable = _distinct(predictor, [base, *candidates], workload)
    chosen = [made for made, _ in runnable]
    shown = [predictor.predict(made, workload).terms_ms for made in chosen]
    term = ("verify" if knobs.method != "off" else "decode") + ".allreduce"
    times = [terms[term] for terms in shown]
    best = min(range(len(times)), key=lambda n: times[n].median)
    worst = max(range(len(times)), key=lambda n: times[n].median)
    # settings outside the choices are compared with them, not counted among them
    every = [*chosen, knobs]
    draws_US = term_draws(predictor, every, [workload] * len(every))["target.allreduce"]
    return SettingsRange(
        default_ms=times[0],
        best_ms=times[best],
        worst_ms=times[worst],
        best=chosen[best],
        worst=chosen[worst],
        saved_ms=interval(most_saved(draws_US[:-1], 0)),
        saved_from_own_ms=interval(most_saved(draws_US, len(every) - 1)),
        swing_ms=interval(spread(draws_US[:-1])),
        num_settings=sum(count for _, count in runnable),
        num_inert=runnable[0][1],
    )


def _made(knobs: Knobs, values: dict[str, Scalar | None]) -> Knobs | None:
    try:
        return Knobs.of({**knobs.values(), **values})
    except ValueError:
        return None


def _distinct(
    predictor: Predictor, candidates: Sequence[Knobs], workload: Workload
) -> list[tuple[Knobs, int]]:
    """One of each class of settings that run the same all-reduces, with how many there are."""
    from model.collectives import CollectiveKey

    first = candidates[0]
    tree = (first.method, first.steps, first.topk, first.draft_tokens)
    step = predictor.step
    width = step.target.allreduce_bytes_per_token
    rows = workload.concurrency * (tree[3] if first.method != "off" else 1)
    keys = [CollectiveKey.of(k) for k in candidates]
    classes = step.collectives.classes(keys, [rows * width])
    found: dict[int, tuple[Knobs, int]] = {}
    for number, knobs in zip(classes, candidates, strict=True):
        if number >= 0:
            kept, count = found.get(number, (knobs, 0))
            found[number] = (kept, count + 1)
    return list(found.values())
