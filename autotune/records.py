"""What is measured and how it came about: measurement, failure, provenance.

Frozen pydantic records, stored as JSON by ``autotune.store``. A value that is not known is None
and ``unknown`` says why; nothing is ever guessed. Terms carry the names of ``model.spec``.
"""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FailureKind = Literal[
    "oom", "crash", "hang", "invalid", "incorrect", "setting_not_effective", "unhealthy_host"
]
OutputCheck = Literal["exact", "near_tie", "incorrect", "unverified"]


class Record(BaseModel):
    """Base of all records: immutable, and an unknown key is refused."""

    # built when first used: most commands use a few of them
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Failure(Record):
    """Why a repeat gave no number."""

    kind: FailureKind
    #: "start", "warmup", "measure", "check" or "close"
    stage: str
    message: str
    log_tail: str = ""


class Health(Record):
    """State of one accelerator (or the host CPU) at one moment."""

    device: str
    clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    utilization_percent: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    #: 1-minute load average of the host
    load_average: float | None = None


class PromptSample(Record):
    """One request of a repeat."""

    prompt_index: int
    output_tokens: int
    decode_s: float
    ttft_ms: float
    #: tokens emitted by each verify, in order (bonus included); empty for plain decoding
    tokens_per_verify: tuple[int, ...] = ()


class Acceptance(Record):
    """Acceptance counts of a repeat. Depth d is the d-th draft token, counted from 1."""

    num_verifies: int
    num_drafted: int
    num_accepted: int
    #: accepted_by_depth[d-1]: verifies whose accepted path reaches depth d (cumulative counts)
    accepted_by_depth: tuple[int, ...]
    #: histogram[n]: verifies that accepted n drafts
    histogram: tuple[int, ...]
    #: accepted_by_depth_rank[d-1][r]: the accepted node at depth d was its parent's r-th child
    accepted_by_depth_rank: tuple[tuple[int, ...], ...]


class Measurement(Record):
    """One repeat of one knobs at one concurrency on one backend."""

    trial: int
    knobs_id: str
    concurrency: int
    repeat: int
    #: position in the run's order of repeats, over all knobs (for drift and interleaving)
    order: int
    started: datetime
    ended: datetime
    #: decode only: tokens after each request's first, over the wall time of decoding
    tokens_per_s: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    cycle_ms: float | None = None
    terms_ms: dict[str, float] = Field(default_factory=dict)
    accept_length: float | None = None
    acceptance: Acceptance | None = None
    #: experts that a MoE layer read in one cycle, mean over layers
    distinct_experts: float | None = None
    #: most memory that was needed on one GPU, GiB (the fullest of the ranks')
    memory_gib: float | None = None
    prompts: tuple[PromptSample, ...] = ()
    output_check: OutputCheck = "unverified"
    #: "why is this value None", by field name
    unknown: dict[str, str] = Field(default_factory=dict)
    #: what a reader of this number must know (resampled, nearest divergence, ...), one line each
    notes: tuple[str, ...] = ()
    health_before: tuple[Health, ...] = ()
    health_after: tuple[Health, ...] = ()
    failure: Failure | None = None


class RankEnvironment(Record):
    """Environment of one worker, read inside it through C getenv."""

    rank: int
    pid: int
    environment: dict[str, str]
    nccl_library: str | None = None
    nccl_version: str | None = None


class Provenance(Record):
    """Everything that tells whether two measurements are comparable (design.md, Trust 6)."""

    config: dict[str, object]
    config_hash: str
    ranks: tuple[RankEnvironment, ...] = ()
    commit: str | None = None
    dirty: bool | None = None
    packages: dict[str, str] = Field(default_factory=dict)
    python: str = ""
    driver: str | None = None
    gpus: tuple[str, ...] = ()
    pcie: tuple[str, ...] = ()
    cpu: str = ""
    cpu_affinity: tuple[int, ...] = ()
    topology: str | None = None
    machine_fingerprint: str = ""
    #: what NCCL's own log says it chose: versions, transports, channels, choices by size
    nccl: dict[str, object] = Field(default_factory=dict)
    #: clocks, temperature, power and throttling when this was collected
    health: tuple[Health, ...] = ()
    unknown: dict[str, str] = Field(default_factory=dict)
