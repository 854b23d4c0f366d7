"""What NCCL runs at the message sizes of a step, and what its settings could change at most."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.digits import size_text
from model.allreduce.model import nccl_setup
from model.collectives import ASSUMED_NCCL_VERSION, CollectiveKey
from model.draws import interval, spread, term_draws
from model.nccl.settings import NcclSettings
from model.predictor import Predictor
from model.spec import Interval, Knobs, Scalar, Workload

Array = NDArray[Any]

#: settings that are compared for the bound: all combinations of what reaches NCCL's choice or its
#: paths, and beside them each of the others alone
BOUND_CHOICES: dict[str, tuple[Scalar | None, ...]] = {
    "nccl.algo": ("auto", "ring", "tree"),
    "nccl.proto": ("auto", "LL", "LL128", "Simple"),
    "nccl.min_channels": (None, 4, 16),
    "nccl.max_channels": (None, 1),
    "nccl.p2p_level": ("auto", "SYS"),
}
_ALONE: dict[str, tuple[Scalar | None, ...]] = {
    "nccl.min_channels": (2, 8, 32),
    "nccl.max_channels": (2, 4, 8),
    "nccl.nthreads": (None, 64, 128, 256, 512),
    "nccl.buffsize": (None, 1 << 20, 16 << 20),
    "nccl.p2p_level": ("LOC", "PIX", "PXB", "PHB"),
}
#: a saving below this share of the cycle is none
_WORTH = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePlan:
    """NCCL's choice for one message."""

    what: str
    size_bytes: int
    algo: str
    proto: str
    channels: int
    threads: int
    #: channels that the communicator has
    channels_there: int

    def text(self) -> str:
        """ "Ring/LL on 2 of 4 channels, 128 threads"."""
        return (
            f"{self.algo.capitalize()}/{self.proto} on {self.channels} of {self.channels_there} "
            f"channels, {self.threads} threads"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclBound:
    """The most that NCCL settings can change in one step; times in ms per cycle."""

    plans: tuple[SizePlan, ...]
    #: all-reduces of the target's forward under the present settings, predicted
    now_ms: Interval
    #: the present settings minus the fastest ones, whichever those are: 0 or more
    saved_ms: Interval
    #: the slowest settings minus the fastest: 0 or more
    swing_ms: Interval
    #: the fastest settings by the medians
    best: Knobs
    num_settings: int
    num_inert: int
    #: the saving as a share of the cycle (median and interval), 0 to 1
    saved_share: Interval
    #: all-reduce as measured: settings can never save more than this
    measured_ms: float | None
    why: str


def message_plans(predictor: Predictor, knobs: Knobs, workload: Workload) -> tuple[SizePlan, ...]:
    """NCCL's choices under the settings of ``knobs``; empty where NCCL carries nothing."""
    if knobs.collectives_backend != "nccl" or knobs.tp < 2 or predictor.machine.gpu is None:
        return ()
    version = predictor.machine.software.nccl_version or ASSUMED_NCCL_VERSION
    try:
        setup = nccl_setup(predictor.machine, knobs.tp, NcclSettings.from_knobs(knobs), version)
        found = []
        for what, size in message_sizes(predictor, knobs, workload):
            choice = setup.selector.choose(size)
            found.append(
                SizePlan(
                    what=what,
                    size_bytes=size,
                    algo=choice.algo,
                    proto=choice.proto,
                    channels=choice.channels,
                    threads=choice.threads,
                    channels_there=setup.selector.comm.num_channels,
                )
            )
    except ValueError:
        # the settings leave nothing to run: the prediction says so
        return ()
    return tuple(found)


def message_sizes(predictor: Predictor, knobs: Knobs, workload: Workload) -> list[tuple[str, int]]:
    """(phase, bytes) of the all-reduces of hidden states in one cycle, the target's first."""
    width = predictor.target.allreduce_bytes_per_token
    requests = workload.concurrency
    if knobs.method == "off" or predictor.draft is None:
        return [("decode", requests * width)]
    draft = predictor.draft
    one = requests * draft.hidden * (4 if draft.weight_format == "fp32" else 2)
    sizes = [("verify", requests * knobs.draft_tokens * width)]
    if knobs.steps > 1:
        sizes.append(("draft", knobs.topk * one))
    return [*sizes, ("extend", (knobs.steps + 1) * one)]


def nccl_bound(
    predictor: Predictor,
    knobs: Knobs,
    workload: Workload,
    *,
    now_ms: Interval,
    measured_cycle_ms: float | None,
    measured_ms: float | None,
) -> NcclBound | None:
    """The bound, or None where NCCL carries nothing.

    ``now_ms``: the target's all-reduces as predicted; the measured cycle and all-reduces where
    there are any. Settings save at most what the all-reduces take.
    """
    if knobs.collectives_backend != "nccl" or knobs.tp < 2 or predictor.machine.gpu is None:
        return None
    chosen, counts = _classes(predictor, knobs, workload)
    terms = term_draws(predictor, chosen, [workload] * len(chosen))
    draws_US = np.sum(np.stack(list(terms.values())), axis=0)
    target_US = np.sum([v for name, v in terms.items() if name.startswith("target.")], axis=0)
    saved_US = draws_US[0] - draws_US
    if measured_ms is not None:
        won_US = target_US[0] - target_US
        saved_US = saved_US - won_US + np.minimum(won_US, measured_ms)
    # the present settings are among the choices, so that the most is never below 0
    saved_S, cycle_S = saved_US.max(axis=0), draws_US[0]
    if measured_cycle_ms is not None:
        saved_S = np.minimum(saved_S, measured_cycle_ms)
        cycle_S = np.full_like(saved_S, measured_cycle_ms)
    best = _best(predictor, chosen, np.median(saved_US, axis=1), _WORTH * float(np.median(cycle_S)))
    plans = message_plans(predictor, knobs, workload)
    return NcclBound(
        plans=plans,
        now_ms=now_ms,
        saved_ms=interval(saved_S),
        swing_ms=interval(spread(draws_US)),
        best=best,
        num_settings=sum(counts),
        num_inert=counts[0],
        saved_share=interval(saved_S / cycle_S),
        measured_ms=measured_ms,
        why=_why(predictor, workload, plans, best, knobs),
    )


def _best(predictor: Predictor, chosen: Sequence[Knobs], saved_U: Array, least_ms: float) -> Knobs:
    """The settings that save most by the medians, the present ones where none saves anything.

    LL128 is no advice where no NVLink keeps its 128-byte stores whole.
    """
    nvlink = any(link.kind == "nvlink" for link in predictor.machine.topology.links)
    safe = nvlink and not predictor.machine.p2p.forced_through_host
    order = np.argsort(-saved_U, kind="stable")
    for index in order:
        if saved_U[index] <= least_ms:
            break
        found: Knobs = chosen[int(index)]
        if safe or found.nccl_proto != "LL128":
            return found
    return chosen[0]


def _classes(
    predictor: Predictor, knobs: Knobs, workload: Workload
) -> tuple[list[Knobs], list[int]]:
    """(one of each class of settings that run the same all-reduces, how many are in each).

    The present settings' class comes first.
    """
    names = list(BOUND_CHOICES)
    unset = {n: v for n, v in Knobs.of({}).values().items() if n.startswith("nccl.")}
    own = knobs.values()
    tried = [dict(zip(names, v, strict=True)) for v in product(*BOUND_CHOICES.values())]
    tried += [{name: value} for name, values in _ALONE.items() for value in values]
    candidates = [knobs]
    for base in (own, own | unset):
        for settings in tried:
            try:
                candidates.append(Knobs.of({**base, **settings}))
            except ValueError:
                # more channels at least than at most
                continue
    candidates = list({candidate.id: candidate for candidate in candidates}.values())
    tree = (knobs.method, knobs.steps, knobs.topk, knobs.draft_tokens)
    sizes = predictor.step.message_sizes([tree], workload.concurrency)
    keys = [CollectiveKey.of(candidate) for candidate in candidates]
    classes = predictor.step.collectives.classes(keys, sizes)
    first: dict[int, int] = {}
    for index, number in enumerate(classes):
        if number >= 0:
            first.setdefault(number, index)
    return [candidates[i] for i in first.values()], [classes.count(n) for n in first]


def _why(
    predictor: Predictor,
    workload: Workload,
    plans: Sequence[SizePlan],
    best: Knobs,
    own: Knobs,
) -> str:
    if not plans:
        return "NCCL's choice under these settings is not known"
    first = plans[0]
    now = f"at {size_text(first.size_bytes)} NCCL runs {first.text()}"
    if best.id == own.id:
        return f"{now}; by the medians no setting gives a faster all-reduce at this size"
    better = message_plans(predictor, best, workload)
    changed = settings_text(best)
    if not better or better[0].text() == first.text():
        return f"{now}; the fastest is the same over faster paths ({changed})"
    return f"{now}; the fastest that settings can reach is {better[0].text()} ({changed})"


def settings_text(knobs: Knobs) -> str:
    """The NCCL settings of some knobs, "NCCL's own choice" without any."""
    parts = [
        f"{name}={value}"
        for name, value in knobs.values().items()
        if name.startswith("nccl.") and value not in (None, "auto")
    ]
    return ", ".join(parts) or "NCCL's own choice"
