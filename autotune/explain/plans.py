"""What NCCL runs at the message sizes of a step, and what its settings could change at most."""

from collections.abc import Sequence
from dataclasses import dataclass

from model import whatif
from model.allreduce.model import nccl_setup
from model.collectives import ASSUMED_NCCL_VERSION
from model.nccl.settings import NcclSettings
from model.predictor import Predictor
from model.spec import Interval, Knobs, Scalar, Workload

#: settings that are compared for the bound: every one that reaches NCCL's choice or its paths
BOUND_CHOICES: dict[str, tuple[Scalar | None, ...]] = {
    "nccl.algo": ("auto", "ring", "tree"),
    "nccl.proto": ("auto", "LL", "LL128", "Simple"),
    "nccl.min_channels": (None, 4, 16),
    "nccl.max_channels": (None, 1, 4),
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
    default_ms: Interval
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
    """(phase, bytes) of the all-reduces in one cycle, the target's forward first."""
    width = predictor.target.allreduce_bytes_per_token
    speculative = knobs.method != "off"
    tokens = knobs.draft_tokens if speculative else 1
    phase = "verify" if speculative else "decode"
    sizes = [(phase, workload.concurrency * tokens * width)]
    tree = (knobs.method, knobs.steps, knobs.topk, knobs.draft_tokens)
    others = predictor.step.message_sizes([tree], workload.concurrency)
    sizes += [("draft and extend", size) for size in sorted(set(others)) if size != sizes[0][1]]
    return sizes


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
    found = whatif.nccl_range(predictor, knobs, workload, BOUND_CHOICES)
    current = predictor.predict(knobs, workload)
    term = ("verify" if knobs.method != "off" else "decode") + ".allreduce"
    saved = predictor.difference_ms(term, knobs, found.best, workload)
    ceiling = measured_ms if measured_ms is not None else current.terms_ms[term].high
    saved = _clipped(saved, ceiling)
    share = Interval(*(min(v / cycle_ms, 1.0) for v in (saved.median, saved.low, saved.high)))
    return NcclBound(
        plans=plans,
        default_ms=current.terms_ms[term],
        saved_ms=saved,
        swing_ms=found.swing_ms,
        best=found.best,
        num_settings=found.num_settings,
        num_inert=found.num_inert,
        saved_share=share,
        measured_ms=measured_ms,
        why=_why(predictor, knobs, workload, plans, found.best),
    )


def _clipped(value: Interval, ceiling: float) -> Interval:
    return Interval(
        *(max(0.0, min(part, ceiling)) for part in (value.median, value.low, value.high))
    )


def _why(
    predictor: Predictor,
    knobs: Knobs,
    workload: Workload,
    plans: Sequence[SizePlan],
    best: Knobs,
) -> str:
    if not plans:
        return "NCCL's choice under these settings is not known"
    first = plans[0]
    now = f"at {kib(first.size_bytes)} NCCL runs {first.text()}"
    better = message_plans(predictor, best, workload)
    if not better or better[0].text() == first.text():
        return f"{now}; no setting gives a faster all-reduce at this size"
    changed = settings_text(best)
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
