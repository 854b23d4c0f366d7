"""The values that travel through the whole tool: knobs, workload, prediction.

Units are in the names. A knob that nobody set is "auto" (or None for a number): the library behind
it (NCCL, say) decides.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

Scalar = str | int | float | bool

#: time of each part of a cycle, ms; the same names in predictions and measurements
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
#: the same for plain decoding (speculation off)
DECODE_TERMS = (
    "decode.attention",
    "decode.moe",
    "decode.allreduce",
    "decode.head",
    "decode.other",
    "sample",
    "host_gap",
)

#: dotted name in a study file -> field of ``Knobs``
KNOB_FIELDS: Mapping[str, str] = {
    "speculation.method": "method",
    "speculation.steps": "steps",
    "speculation.topk": "topk",
    "speculation.draft_tokens": "draft_tokens",
    "parallel.tp": "tp",
    "collectives.backend": "collectives_backend",
    "nccl.algo": "nccl_algo",
    "nccl.proto": "nccl_proto",
    "nccl.min_channels": "nccl_min_channels",
    "nccl.max_channels": "nccl_max_channels",
    "nccl.buffsize": "nccl_buffsize_bytes",
    "nccl.nthreads": "nccl_nthreads",
    "nccl.p2p_level": "nccl_p2p_level",
    "host.numa_bind": "numa_bind",
    "cuda_graph.decode": "graph_decode",
    "cuda_graph.draft": "graph_draft",
    "cuda_graph.verify": "graph_verify",
    "cuda_graph.extend": "graph_extend",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """One knobs: a resolved choice of every setting, in canonical form.

    ``draft_tokens`` counts the root, as in SGLang. Build through ``Knobs.of``, which brings
    equivalent choices to one form (a chain has draft_tokens = steps + 1; with speculation off the
    tree is 0/0/0; NCCL settings are "auto" when NCCL does not carry the all-reduce), so that
    equivalent knobs are equal and share one id.
    """

    method: str
    steps: int
    topk: int
    draft_tokens: int
    tp: int
    collectives_backend: str
    nccl_algo: str = "auto"
    nccl_proto: str = "auto"
    nccl_min_channels: int | None = None
    nccl_max_channels: int | None = None
    nccl_buffsize_bytes: int | None = None
    nccl_nthreads: int | None = None
    nccl_p2p_level: str = "auto"
    numa_bind: bool = False
    graph_decode: bool = False
    graph_draft: bool = False
    graph_verify: bool = False
    graph_extend: bool = False
    #: knobs of one backend only, by full name ("sglang.attention_backend"), sorted
    extra: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Scalar | None]) -> "Knobs":
        """Build from dotted names in canonical form.

        Raises ``ValueError`` naming an unknown knob or an impossible tree.
        """
        known: dict[str, Scalar | None] = {}
        extra: list[tuple[str, Scalar]] = []
        for name, value in values.items():
            if name in KNOB_FIELDS:
                numeric_auto = value == "auto" and name in _AUTO_IS_NONE
                known[KNOB_FIELDS[name]] = None if numeric_auto else value
            elif name.split(".")[0] in ("sglang", "vllm", "engine", "sim") and value is not None:
                extra.append((name, value))
            else:
                raise ValueError(f"unknown knob {name!r}; known: {', '.join(KNOB_FIELDS)}")
        knobs = cls(**_canonical(known), extra=tuple(sorted(extra)))  # type: ignore[arg-type]
        problem = knobs.problem()
        if problem is not None:
            raise ValueError(problem)
        return knobs

    def problem(self) -> str | None:
        """Why these knobs cannot exist, or None."""
        if self.method not in ("off", "eagle3"):
            return f"speculation.method {self.method!r} is unknown; known: off, eagle3"
        if self.tp < 1:
            return f"parallel.tp {self.tp} must be at least 1"
        if self.method == "eagle3":
            if self.steps < 1 or self.topk < 1:
                return f"speculation.steps {self.steps} and topk {self.topk} must be at least 1"
            if not 2 <= self.draft_tokens <= 1 + self.max_draft_nodes:
                return (
                    f"speculation.draft_tokens {self.draft_tokens} (root included) must be between "
                    f"2 and {1 + self.max_draft_nodes} for steps {self.steps}, topk {self.topk}"
                )
        low, high = self.nccl_min_channels, self.nccl_max_channels
        if low is not None and high is not None and low > high:
            return f"nccl.min_channels {low} is above nccl.max_channels {high}"
        return None

    @property
    def max_draft_nodes(self) -> int:
        """Largest tree these steps can build, without the root."""
        return self.topk + max(self.steps - 1, 0) * self.topk**2

    def values(self) -> dict[str, Scalar | None]:
        """By dotted name; unset numbers are None. ``Knobs.of(knobs.values()) == knobs``."""
        named: dict[str, Scalar | None] = {
            name: getattr(self, attr) for name, attr in KNOB_FIELDS.items()
        }
        named.update(self.extra)
        return named

    @property
    def id(self) -> str:
        """Canonical id: 12 hex digits of the hash of the resolved values."""
        text = json.dumps(self.values(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def tree_text(self) -> str:
        """ "off", "eagle3 chain 3" or "eagle3 3x2 tree, 5 tokens"."""
        if self.method == "off":
            return "off"
        if self.topk == 1:
            return f"eagle3 chain {self.steps}"
        return f"eagle3 {self.steps}x{self.topk} tree, {self.draft_tokens} tokens"

    def label(self) -> str:
        """Short text for a table row: what differs from plain defaults."""
        parts = [self.tree_text(), self.collectives_backend]
        for name, attr in KNOB_FIELDS.items():
            value = getattr(self, attr)
            if name.startswith("nccl.") and value not in (None, "auto"):
                parts.append(f"{name.removeprefix('nccl.')}={value}")
        graphs = [n for n in ("decode", "draft", "verify", "extend") if getattr(self, f"graph_{n}")]
        if graphs:
            parts.append("graphs: " + "+".join(graphs))
        elif self.collectives_backend != "gloo":
            # ranks on CPUs have none to say anything about
            parts.append("no graphs")
        parts.extend(f"{name}={value}" for name, value in self.extra)
        return ", ".join(parts)


_AUTO_IS_NONE = ("nccl.min_channels", "nccl.max_channels", "nccl.buffsize", "nccl.nthreads")


def _canonical(known: dict[str, Scalar | None]) -> dict[str, Scalar | None]:
    """Fill defaults and bring equivalent choices to one form."""
    defaults: dict[str, Scalar | None] = {
        "method": "off",
        "steps": 0,
        "topk": 0,
        "draft_tokens": 0,
        "tp": 1,
        "collectives_backend": "nccl",
    }
    merged: dict[str, Scalar | None] = {**defaults, **known}
    if merged["method"] == "off":
        merged |= {"steps": 0, "topk": 0, "draft_tokens": 0}
        merged |= {"graph_draft": False, "graph_verify": False, "graph_extend": False}
    elif merged["topk"] == 1:
        steps = merged["steps"]
        assert isinstance(steps, int)
        merged["draft_tokens"] = steps + 1
    if merged["collectives_backend"] != "nccl":
        for spec in fields(Knobs):
            if spec.name.startswith("nccl_"):
                merged[spec.name] = spec.default  # type: ignore[assignment]
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is served while knobs are measured: one load level of a study."""

    prompts: str
    prompts_sha256: str
    chat_template: str | None
    input_len: int
    output_len: int
    #: mean context length during decoding, tokens: input_len + output_len / 2
    context: int
    temperature: float
    ignore_eos: bool
    seed: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Interval:
    """Median and 90 % interval of a predicted value."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Inert:
    """A knob that cannot change the outcome here, with the reason in one sentence."""

    knob: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model expects of knobs under a workload; stored before the measurement."""

    knobs: Knobs
    workload: Workload
    calibration_id: str
    #: per term of CYCLE_TERMS or DECODE_TERMS, ms per cycle
    terms_ms: Mapping[str, Interval]
    cycle_ms: Interval
    accept_length: Interval
    tokens_per_s: Interval
    #: the physical bound of each term, ms per cycle
    speed_of_light_ms: Mapping[str, float]
    memory_gib_per_gpu: float
    feasible: bool
    infeasible_reason: str | None = None
    inert: tuple[Inert, ...] = field(default=())
    #: what a reader must know to compare these numbers with others
    notes: tuple[str, ...] = field(default=())
