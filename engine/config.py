"""The launch config: the ``engine:`` block of a best-config YAML, and what the engine starts from.

Strict: an unknown key, a wrong type or an impossible combination is one line naming the key.
"""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

#: rows a slot keeps beyond its context: a verify's tree, or a draft tree's inner nodes
SCRATCH_ROWS = 128


#: what an environment can hold: no name with "=" or NUL, no value with NUL
_NAME, _TEXT = r"^[A-Za-z_][A-Za-z0-9_]*$", r"^[^\x00]*$"


class Schema(BaseModel):
    """Base: immutable, strict types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TargetSpec(Schema):
    """A checkpoint folder, or a shape with random weights (``layers`` runs a slice of it)."""

    path: str | None = None
    shape: str | None = None
    weights: Literal["random"] | None = None
    layers: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.shape is None):
            raise ValueError("give either path (a checkpoint folder) or shape, weights: random")
        if self.shape is not None and self.weights != "random":
            raise ValueError("a shape has no weights of its own: add weights: random")
        if self.path is not None and (self.weights is not None or self.layers is not None):
            raise ValueError("weights and layers go with shape, not with path")
        return self


class DraftSpec(Schema):
    """An EAGLE-3 checkpoint folder, or a head with random weights.

    A random head has the sizes of ``shape`` (an EAGLE-3 config.json or its folder), or else fits
    the target with ``vocab`` draft tokens.
    """

    path: str | None = None
    shape: str | None = None
    weights: Literal["random"] | None = None
    vocab: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.weights is None):
            raise ValueError("give either path (an EAGLE-3 folder) or weights: random")
        if self.path is not None and (self.vocab is not None or self.shape is not None):
            raise ValueError("shape and vocab go with weights: random, not with path")
        if self.shape is not None and self.vocab is not None:
            raise ValueError("give either shape (its draft vocabulary holds) or vocab")
        return self


class SpeculationConfig(Schema):
    """How tokens are drafted. ``draft_tokens`` counts the root; a chain (topk 1) may omit it."""

    method: Literal["off", "eagle3"] = "off"
    steps: int = Field(default=0, ge=0)
    topk: int = Field(default=0, ge=0)
    draft_tokens: int = Field(default=0, ge=0)
    #: shares of verifies that accept at least 1, 2, ... drafts, whatever the draft is worth
    synthetic_acceptance: tuple[float, ...] | None = None

    @field_validator("synthetic_acceptance", mode="before")
    @classmethod
    def _rates(cls, value: object) -> object:
        return tuple(float(v) for v in value) if isinstance(value, (list, tuple)) else value

    @field_validator("method", mode="before")
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        # unquoted `off` is a boolean in YAML
        return "off" if value is False else value

    @model_validator(mode="after")
    def _tree_exists(self) -> Self:
        if self.method == "off":
            if self.synthetic_acceptance is not None:
                raise ValueError("synthetic_acceptance goes with speculation, not with method off")
            return self
        if self.steps < 1 or self.topk < 1:
            raise ValueError(f"steps {self.steps} and topk {self.topk} must be at least 1")
        largest = 1 + self.topk + (self.steps - 1) * self.topk**2
        if self.topk == 1 and self.draft_tokens not in (0, self.steps + 1):
            raise ValueError(
                f"draft_tokens {self.draft_tokens}: a chain of {self.steps} steps has "
                f"{self.steps + 1} (root included)"
            )
        if self.topk > 1 and not 2 <= self.draft_tokens <= largest:
            raise ValueError(
                f"draft_tokens {self.draft_tokens} (root included) must be between 2 and "
                f"{largest} for steps {self.steps}, topk {self.topk}"
            )
        if max(self.num_tokens, (self.steps - 1) * self.topk) > SCRATCH_ROWS:
            raise ValueError(
                f"draft_tokens {self.num_tokens} and (steps - 1) x topk "
                f"{(self.steps - 1) * self.topk} must not exceed {SCRATCH_ROWS}"
            )
        self._check_rates()
        return self

    def _check_rates(self) -> None:
        rates = self.synthetic_acceptance
        if rates is None:
            return
        falling = all(a >= b for a, b in pairwise(rates))
        if len(rates) != self.steps or not falling or not all(0 <= r <= 1 for r in rates):
            raise ValueError(
                f"synthetic_acceptance {list(rates)} must be {self.steps} rates (one a step) "
                "between 0 and 1, none above the one before"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens in one verify of one request, root included."""
        if self.method == "off":
            return 1
        return self.steps + 1 if self.topk == 1 else self.draft_tokens


class ScheduleEntry(Schema):
    """Speculation used while at most ``max_concurrency`` requests run together."""

    max_concurrency: int = Field(ge=1)
    speculation: SpeculationConfig


class Collectives(Schema):
    """Who carries the all-reduce; None means gloo on a CPU and nccl on GPUs.

    ``one_shot``: shared memory, on GPUs pinned host memory for all but long prompts' sums.
    """

    backend: Literal["gloo", "nccl", "one_shot", "two_shot"] | None = None


class Nccl(Schema):
    """NCCL settings; None leaves the choice to NCCL."""

    algo: str | None = None
    proto: str | None = None
    min_channels: int | None = Field(default=None, ge=1)
    max_channels: int | None = Field(default=None, ge=1)
    buffsize: int | None = Field(default=None, ge=1)
    nthreads: int | None = Field(default=None, ge=1)
    p2p_level: str | None = None

    @field_validator("*", mode="before")
    @classmethod
    def _auto(cls, value: object) -> object:
        return None if value == "auto" else value

    @model_validator(mode="after")
    def _channels(self) -> Self:
        low, high = self.min_channels, self.max_channels
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_channels {low} is above max_channels {high}")
        return self

    def environment(self) -> dict[str, str | None]:
        """NCCL variables; None for one that must not be set (NCCL decides)."""
        algo = self.algo.capitalize() if self.algo in ("ring", "tree") else self.algo
        values: dict[str, str | int | None] = {
            "NCCL_ALGO": algo,
            "NCCL_PROTO": self.proto,
            "NCCL_MIN_NCHANNELS": self.min_channels,
            "NCCL_MAX_NCHANNELS": self.max_channels,
            "NCCL_BUFFSIZE": self.buffsize,
            "NCCL_NTHREADS": self.nthreads,
            "NCCL_P2P_LEVEL": self.p2p_level,
        }
        return {name: None if v is None else str(v) for name, v in values.items()}


class CudaGraph(Schema):
    """Which parts of a cycle run as captured CUDA graphs."""

    decode: bool = False
    draft: bool = False
    verify: bool = False
    extend: bool = False
    #: chunks of a prompt; None: as decode
    prefill: bool | None = None

    @property
    def captures_prefill(self) -> bool:
        """Whether chunks of a prompt are captured."""
        return self.decode if self.prefill is None else self.prefill


class Host(Schema):
    """Placement of the workers."""

    numa_bind: bool = False
    #: intra-op threads of a rank (CPU ranks compute with them)
    threads: int = Field(default=1, ge=1, le=1024)


class LaunchConfig(Schema):
    """Everything needed to start the engine."""

    target: TargetSpec
    draft: DraftSpec | None = None
    tp: int = Field(default=1, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"
    #: index of each rank's GPU; None: rank r has GPU r
    devices: list[Annotated[int, Field(ge=0)]] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    #: which kernels compute; "auto" is reference on a CPU, triton on a GPU
    ops: Literal["auto", "reference", "triton"] = "auto"
    max_context: int = Field(default=2048, ge=2)
    max_concurrency: int = Field(default=1, ge=1)
    collectives: Collectives = Collectives()
    nccl: Nccl = Nccl()
    #: further environment of every worker (NCCL_DEBUG, ...)
    environment: dict[
        Annotated[str, Field(pattern=_NAME)], Annotated[str, Field(pattern=_TEXT)]
    ] = {}
    cuda_graph: CudaGraph = CudaGraph()
    host: Host = Host()
    schedule: list[ScheduleEntry] = []
    timeout_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    seed: int = 0
    machine_fingerprint: str | None = None

    @model_validator(mode="after")
    def _fits_device(self) -> Self:
        backend = self.collectives_backend
        allowed = ("gloo", "one_shot") if self.device == "cpu" else ("nccl", "one_shot", "gloo")
        if backend not in allowed:
            raise ValueError(
                f"collectives.backend {backend!r} does not run on device {self.device!r}; "
                f"there: {', '.join(allowed)}"
            )
        if self.device == "cpu" and any(self.cuda_graph.model_dump().values()):
            raise ValueError("cuda_graph: there are no CUDA graphs on device 'cpu'; set all false")
        if (
            self.device == "cuda"
            and backend == "gloo"
            and any(self.cuda_graph.model_dump().values())
        ):
            raise ValueError(
                "collectives.backend 'gloo' on device 'cuda' goes through the host, which no CUDA "
                "graph can: set all of cuda_graph false, or use nccl"
            )
        self._check_devices(backend)
        if self.draft is None and any(e.speculation.method != "off" for e in self.schedule):
            raise ValueError("schedule speculates, but no draft is given")
        return self

    def _check_devices(self, backend: str) -> None:
        devices = self.devices
        if devices is None:
            return
        if self.device == "cpu":
            raise ValueError(f"devices {devices}: there are none on device 'cpu'; leave it out")
        if len(devices) != self.tp:
            raise ValueError(f"devices {devices}: {len(devices)} GPUs for tp {self.tp}; one a rank")
        if backend == "nccl" and self.shares_gpu:
            raise ValueError(
                f"devices {devices}: NCCL takes one rank a GPU; to share one, use "
                "collectives.backend gloo or one_shot (slow: for tests)"
            )
        if self.shares_gpu and self.cuda_graph.captures_prefill:
            raise ValueError(
                f"devices {devices}: ranks that share a GPU send prompts through the host, which "
                "no CUDA graph can: set cuda_graph.prefill false"
            )

    @property
    def shares_gpu(self) -> bool:
        """Whether two ranks have the same GPU."""
        return self.devices is not None and len(set(self.devices)) < len(self.devices)

    def device_of(self, rank: int) -> int:
        """Index of the rank's GPU."""
        return rank if self.devices is None else self.devices[rank]

    @property
    def collectives_backend(self) -> str:
        """The all-reduce carrier in use."""
        return self.collectives.backend or ("gloo" if self.device == "cpu" else "nccl")

    @property
    def op_set(self) -> str:
        """The op set in use."""
        if self.ops != "auto":
            return self.ops
        return "reference" if self.device == "cpu" else "triton"

    def speculation_at(self, concurrency: int) -> SpeculationConfig:
        """The schedule's choice for this many simultaneous requests; off beyond its end."""
        fitting = [e for e in self.schedule if concurrency <= e.max_concurrency]
        if not fitting:
            return SpeculationConfig()
        return min(fitting, key=lambda e: e.max_concurrency).speculation
