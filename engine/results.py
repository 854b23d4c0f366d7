"""What goes into a run and what comes out: plain frozen values, no torch.

Times are seconds unless the name says otherwise; phase names are those of the performance model
(``draft``, ``verify.attention``, ..., ``decode.*`` for plain decoding).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

#: time of each part of a speculative cycle
CYCLE_TERMS = (
    "draft",
    "verify.attention",
    "verify.moe",
    "verify.allreduce",
    "verify.head",
    "verify.other",
    "extend",
    "sample",
    "host_gap",
)
#: the same for plain decoding
DECODE_TERMS = (
    "decode.attention",
    "decode.moe",
    "decode.allreduce",
    "decode.head",
    "decode.other",
    "sample",
    "host_gap",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue. ``temperature`` 0 is greedy; ``seed`` makes sampling repeatable.

    On a GPU the text of a seed is the same with and without speculation, but for rounding; on a CPU
    it depends on the speculation, and is another than on a GPU.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """What became of one request."""

    token_ids: tuple[int, ...]
    #: "length" or "eos"
    finish_reason: str
    #: tokens made by each verify (accepted drafts + 1), before the output is cut; () when plain
    tokens_per_verify: tuple[int, ...]
    #: from admission to a slot until the first token
    ttft_s: float
    #: from the first token until the last, prefills of other requests in between left out
    decode_s: float
    #: lead of the best token over the second in log-probability, per token; () unless asked for
    margins: tuple[float, ...] = ()
    #: the second best token, per token; () unless margins were asked for
    runners_up: tuple[int, ...] = ()

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per output token after the first; None for a single token."""
        later = len(self.token_ids) - 1
        return self.decode_s * 1e3 / later if later > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Acceptance over all verifies of a run. Depth d is the d-th draft token, counted from 1."""

    num_verifies: int
    num_drafted: int
    num_accepted: int
    #: [d-1]: verifies whose accepted path reaches depth d
    accepted_by_depth: tuple[int, ...]
    #: [n]: verifies that accepted n drafts
    histogram: tuple[int, ...]
    #: [d-1][r]: the accepted node at depth d was its parent's r-th best child
    accepted_by_depth_rank: tuple[tuple[int, ...], ...]

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify, bonus token included; None without a verify."""
        return 1.0 + self.num_accepted / self.num_verifies if self.num_verifies else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One ``generate``."""

    requests: tuple[RequestResult, ...]
    counters: Counters
    #: wall time of all decode cycles (prefills left out)
    decode_wall_s: float
    #: tokens delivered after each request's first
    decode_tokens: int
    num_cycles: int
    #: mean over cycles
    cycle_ms: float
    #: by phase name, ms per cycle; sums to ``cycle_ms``
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    #: cycles the phases were timed on (all on a CPU, a sample on a GPU)
    num_timed_cycles: int = 0
    #: "resident" (state on the device, host reads behind) or "stepwise: " and why
    path: str = "stepwise"
    #: segment and shape -> "captured", or "eager: " and why
    graphs: Mapping[str, str] = field(default_factory=dict)
    #: GPU time of each part of a cycle, from events around it on a sample of the cycles; with
    #: graphs, their sum without "host_gap" is the GPU's busy time. {} on a CPU
    segments_ms: Mapping[str, float] = field(default_factory=dict)
    #: mean over layers of the experts touched in one sampled cycle; None where not sampled
    distinct_experts: float | None = None
    #: most memory that a rank needed on its GPU (the fullest rank); None on a CPU
    peak_memory_bytes: int | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Decode only; None when nothing was decoded."""
        return self.decode_tokens / self.decode_wall_s if self.decode_wall_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """Environment of one worker as C ``getenv`` sees it, and the NCCL library it loaded."""

    rank: int
    pid: int
    environment: Mapping[str, str]
    nccl_library: str | None
    nccl_version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllreduceTime:
    """All-reduce of one message size on all ranks, as rank 0 sees it."""

    size_bytes: int
    median_us: float
    times_us: tuple[float, ...]
