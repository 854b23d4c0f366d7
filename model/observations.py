"""What calibration learns from: single terms, all-reduce rows, acceptance counts.

Observables are decomposed. Tokens per second mix every constant and tell none of them, so they are
not an observation here: give the cycle's terms, or ``term="cycle"`` when only the sum is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from model.spec import CYCLE_TERMS, DECODE_TERMS, Knobs, Workload

#: sums that may be observed instead of single terms
SUM_TERMS = ("cycle", "verify", "decode")
OBSERVABLE_TERMS = tuple(dict.fromkeys((*CYCLE_TERMS, *DECODE_TERMS, *SUM_TERMS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TermObservation:
    """A term of one knobs measured under one workload.

    ``term`` is a name of ``model.spec``, or "verify"/"decode" (its sub-terms together) or "cycle"
    (everything). ``rel_sd`` is the relative standard deviation of the value.
    """

    knobs: Knobs
    workload: Workload
    term: str
    value_ms: float
    rel_sd: float
    #: where the value is from (measurement id), kept in the calibration
    source: str = ""

    def __post_init__(self) -> None:
        if self.term not in OBSERVABLE_TERMS:
            raise ValueError(f"unknown term {self.term!r}; known: {', '.join(OBSERVABLE_TERMS)}")
        _positive(f"{self.term} value_ms", self.value_ms)
        _positive(f"{self.term} rel_sd", self.rel_sd)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllreduceObservation:
    """One measured all-reduce: NCCL variables in ``environment`` (empty for gloo)."""

    backend: str
    num_ranks: int
    size_bytes: int
    graphed: bool
    time_us: float
    rel_sd: float
    environment: Mapping[str, str] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        if self.num_ranks < 2:
            raise ValueError(f"num_ranks {self.num_ranks}: an all-reduce needs at least 2 ranks")
        _positive("size_bytes", self.size_bytes)
        _positive("time_us", self.time_us)
        _positive("rel_sd", self.rel_sd)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCounts:
    """Counts of one run (records of ``autotune.records.Acceptance``): depth d counts from 1."""

    steps: int
    topk: int
    draft_tokens: int
    num_verifies: int
    #: [d-1]: verifies whose accepted path reaches depth d
    accepted_by_depth: tuple[int, ...]
    #: [d-1][r]: the accepted node at depth d was its parent's r-th child; empty if unknown
    accepted_by_depth_rank: tuple[tuple[int, ...], ...] = ()
    #: load level they were counted at: every level has prompts of its own; None: unknown
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.num_verifies < 0:
            raise ValueError(f"num_verifies {self.num_verifies} must not be negative")
        previous = self.num_verifies
        for depth, count in enumerate(self.accepted_by_depth, start=1):
            if not 0 <= count <= previous:
                raise ValueError(
                    f"accepted_by_depth[{depth - 1}] is {count}, but only {previous} verifies "
                    "reached the depth before: counts are cumulative and cannot grow"
                )
            previous = count
        for depth, ranks in enumerate(self.accepted_by_depth_rank, start=1):
            reached = (
                self.accepted_by_depth[depth - 1] if depth <= len(self.accepted_by_depth) else 0
            )
            if min(ranks, default=0) < 0 or sum(ranks) > reached:
                raise ValueError(
                    f"accepted_by_depth_rank[{depth - 1}] sums to {sum(ranks)}, above the "
                    f"{reached} verifies that reached depth {depth}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsObservation:
    """Distinct experts that a MoE layer read, mean over layers and steps, as an engine counts."""

    tokens_per_request: float
    requests: int
    experts: int
    experts_per_token: int
    distinct: float
    rel_sd: float
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("tokens_per_request", "requests", "experts_per_token", "rel_sd"):
            _positive(name, getattr(self, name))
        most = min(self.experts, self.tokens_per_request * self.requests * self.experts_per_token)
        if not self.experts_per_token <= self.distinct <= most * (1 + 1e-9):
            raise ValueError(
                f"distinct {self.distinct} experts must be between {self.experts_per_token} (of "
                f"one token) and {most:g} (all assignments, or all experts)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptLength:
    """Only the accept length (bonus included) of a tree is known, as in published tables."""

    steps: int
    topk: int
    draft_tokens: int
    accept_length: float
    rel_sd: float

    def __post_init__(self) -> None:
        if not 1.0 <= self.accept_length <= self.steps + 1:
            raise ValueError(
                f"accept_length {self.accept_length} must be between 1 and steps + 1 = "
                f"{self.steps + 1} (the bonus token counts)"
            )
        _positive("rel_sd", self.rel_sd)


Observation = (
    TermObservation | AllreduceObservation | ExpertsObservation | AcceptanceCounts | AcceptLength
)


def _positive(name: str, value: float) -> None:
    if not value > 0 or value == float("inf"):
        raise ValueError(f"{name} is {value!r}; it must be positive and finite")
