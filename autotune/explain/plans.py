"""What NCCL runs at the message sizes of a step, and what its settings could change at most."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.allreduce.model import nccl_setup
from model.collectives import ASSUMED_NCCL_VERSION, CollectiveKey
from model.intervals import Z90
from model.many import DELTA, probes
from model.nccl.settings import NcclSettings
from model.predictor import Predictor
from model.spec import Interval, Knobs, Scalar, Workload
from model.step import StepRows

#: settings that are compared for the bound: every one that reaches NCCL's choice or its paths
BOUND_CHOICES: dict[str, tuple[Scalar | None, ...]] = {
    "nccl.algo": ("auto", "ring", "tree"),
    "nccl.proto": ("auto", "LL", "LL128", "Simple"),
    "nccl.min_channels": (None, 4, 16),
    "nccl.max_channels": (None, 1),
    "nccl.p2p_level": ("auto", "SYS"),
}


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
    saved_ms: Interval
    swing_ms: Interval
    best: Knobs
    num_settings: int
    num_inert: int
    #: the saving as a share of the cycle (median and interval)
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
    cycle_ms: float,
    measured_ms: float | None,
) -> NcclBound | None:
    """The bound, or None where NCCL carries nothing."""
    if knobs.collectives_backend != "nccl" or knobs.tp < 2 or predictor.machine.gpu is None:
        return None
    plans = message_plans(predictor, knobs, workload)
    times = _times(predictor, knobs, workload)
    saved = _clipped(
        times.difference(times.own, times.best),
        measured_ms if measured_ms is not None else times.interval(times.own).high,
    )
    share = Interval(*(min(v / cycle_ms, 1.0) for v in (saved.median, saved.low, saved.high)))
    return NcclBound(
        plans=plans,
        now_ms=times.interval(times.own),
        saved_ms=saved,
        swing_ms=times.difference(times.worst, times.best),
        best=times.knobs[times.best],
        num_settings=sum(times.counts),
        num_inert=times.counts[times.own],
        saved_share=share,
        measured_ms=measured_ms,
        why=_why(predictor, workload, plans, times.knobs[times.best], knobs),
    )


@dataclass(frozen=True, eq=False)
class _Times:
    """All-reduce term of each class of settings, ms: ``values`` [D, U], row 0 as fitted."""

    knobs: list[Knobs]
    #: settings in each class
    counts: list[int]
    values: NDArray[Any]
    covariance: NDArray[Any]
    #: class of the present settings
    own: int

    @property
    def best(self) -> int:
        """Fastest class; the present one where it is as fast."""
        fastest = int(np.argmin(self.values[0]))
        same = self.values[0, self.own] <= self.values[0, fastest] * (1 + 1e-9)
        return self.own if same else fastest

    @property
    def worst(self) -> int:
        """Slowest class."""
        return int(np.argmax(self.values[0]))

    def difference(self, more: int, less: int) -> Interval:
        """Time of one class minus another's, ms; errors that both share cancel."""
        return self._spread(self.values[:, more] - self.values[:, less])

    def interval(self, index: int) -> Interval:
        """Time of one class, ms."""
        return self._spread(self.values[:, index])

    def _spread(self, values_D: NDArray[Any]) -> Interval:
        gradient = (values_D[1:] - values_D[0]) / DELTA
        sd = float(np.sqrt(max(gradient @ self.covariance @ gradient, 0.0)))
        middle = float(values_D[0])
        return Interval(middle, middle - Z90 * sd, middle + Z90 * sd)


def _times(predictor: Predictor, knobs: Knobs, workload: Workload) -> _Times:
    """One row per class of settings that run the same all-reduces."""
    names = list(BOUND_CHOICES)
    candidates = [knobs]
    for values in product(*(BOUND_CHOICES[name] for name in names)):
        try:
            settings = dict(zip(names, values, strict=True))
            candidates.append(Knobs.of({**knobs.values(), **settings}))
        except ValueError:
            # more channels at least than at most
            continue
    (_, size), *_ = message_sizes(predictor, knobs, workload)
    keys = [CollectiveKey.of(candidate) for candidate in candidates]
    classes = predictor.step.collectives.classes(keys, [size])
    first: dict[int, int] = {}
    for index, number in enumerate(classes):
        if number >= 0:
            first.setdefault(number, index)
    chosen = [candidates[index] for index in first.values()]
    # the present settings head the list twice: as they are, and among the choices
    counts = [classes[1:].count(number) for number in first]
    rows = StepRows.of(chosen, [workload] * len(chosen))
    terms = predictor.step.terms_ms(rows, probes(predictor.calibration), False)
    shape = (len(predictor.calibration.names) + 1, len(chosen))
    return _Times(
        knobs=chosen,
        counts=counts,
        values=np.broadcast_to(terms["target.allreduce"], shape),
        covariance=predictor.calibration.covariance,
        own=0,
    )


def _clipped(value: Interval, ceiling: float) -> Interval:
    return Interval(
        *(max(0.0, min(part, ceiling)) for part in (value.median, value.low, value.high))
    )


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
    now = f"at {kib(first.size_bytes)} NCCL runs {first.text()}"
    if best.id == own.id:
        return f"{now}; no setting gives a faster all-reduce at this size"
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


def kib(size_bytes: float) -> str:
    """Bytes for people: "14 KiB", "1.75 MiB"."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    if size_bytes < 1 << 20:
        return f"{size_bytes / 1024:.4g} KiB"
    return f"{size_bytes / (1 << 20):.3g} MiB"
