"""What a server's programs look like to the model: kernels per part, priors, how a load runs.

Formulas are the same for all; a server that fuses a layer into 6 kernels and one that runs 21 of
them differ in counts, in what a launch from its host program costs, and in whether its host works
between cycles at all. Counts are of captured kernels of one forward on one rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from model.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCounts:
    """Kernels of one layer by part, of the head, and of one draft forward."""

    attention_gqa: int
    attention_mla: int
    #: all kernels of the routed experts, router included (what a host launches)
    moe: int
    #: of them, those beside the experts' own whose time ``moe_fixed_us`` does not hold
    router: int
    shared: int
    dense: int
    #: norms and residual adds that are kernels of their own
    other: int
    #: embedding and the like, once a forward
    once: int
    head: int
    draft: int
    #: selection kernels of one draft step (top-k, gather, scores)
    select: int
    #: sampling and acceptance, where they are launched one by one
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorRow:
    """A prior of ``model.constants`` that a server knows better."""

    value: float
    sd: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One kind of server."""

    name: str
    kernels: KernelCounts
    #: a measurement is one batch of requests that start together and ends with the last of them
    waves: bool
    #: the draft lives whole on one rank; else it is divided like the target
    whole_draft: bool
    #: time that the marks around an all-reduce's place take by themselves, us
    mark_us: float = 0.0
    #: launches one kernel, in calls of the probe's eager torch op
    launch_calls: float | None = None
    priors: Mapping[str, PriorRow] = field(default_factory=dict)


_SGLANG = KernelCounts(
    attention_gqa=6, attention_mla=11, moe=7, router=1, shared=3, dense=3, other=2, once=2,
    head=4, draft=16, select=8, sample=0,
)  # fmt: skip
_ENGINE = KernelCounts(
    attention_gqa=4, attention_mla=8, moe=3, router=0, shared=3, dense=3, other=0, once=2,
    head=2, draft=8, select=2, sample=3,
)  # fmt: skip
#: 175 kernels in a decode step of 8 Qwen3 layers, 1,026 in a cycle of 48 and 3 draft steps
_VLLM = KernelCounts(
    attention_gqa=11, attention_mla=14, moe=8, router=4, shared=3, dense=3, other=2, once=3,
    head=4, draft=18, select=6, sample=6,
)  # fmt: skip

_ROWS = "bench/engine.py on one H200, Qwen3-30B-A3B slices and a tiny model; widened"
_VLLM_ROWS = "vLLM 0.26 on one H200: wall less GPU busy, 8 and 48 layers; widened"


def _priors(source: str, **rows: tuple[float, float]) -> Mapping[str, PriorRow]:
    return {name: PriorRow(value=v, sd=sd, source=source) for name, (v, sd) in rows.items()}


#: a server that is not known: SGLang's layers, wide priors, a steady load
GENERIC = Server(name="generic", kernels=_SGLANG, waves=False, whole_draft=False)
#: the engine of this repository: fused kernels, whole cycles queued ahead when all is captured,
#: launches from Python when not
ENGINE = Server(
    name="engine",
    kernels=_ENGINE,
    waves=True,
    whole_draft=True,
    mark_us=0.7,
    launch_calls=17.0,
    priors=_priors(
        _ROWS,
        attention_us=(2.5, 0.7),
        attention_batched_us=(5.0, 0.6),
        moe_fixed_us=(7.0, 0.5),
        moe_batched_us=(1.0, 1.2),
        moe_rows_us=(1.4, 0.7),
        graph_launch_us=(3.0, 0.7),
        draft_step_us=(6.0, 0.7),
        tree_us=(10.0, 1.0),
        tree_step_us=(45.0, 0.6),
        extend_us=(12.0, 0.6),
        sample_us=(5.0, 0.7),
        host_gap_us=(6.0, 0.6),
        host_gap_spec_us=(2.0, 1.0),
        host_gap_request_us=(0.05, 1.5),
        eager_gap_us=(250.0, 0.7),
        allreduce_factor=(1.25, 0.3),
        skew_us=(1.5, 1.0),
        gather_factor=(0.2, 1.5),
        draft_reduce_factor=(0.15, 1.2),
    ),
)
#: vLLM: its host prepares a step while the GPU runs the last one, so the gap left over is small
#: in long steps and milliseconds in short ones
VLLM = Server(
    name="vllm",
    kernels=_VLLM,
    waves=False,
    whole_draft=False,
    priors=_priors(
        _VLLM_ROWS,
        attention_us=(4.0, 0.7),
        moe_fixed_us=(9.0, 0.6),
        sample_us=(40.0, 0.8),
        host_gap_us=(350.0, 0.8),
        host_gap_request_us=(2.0, 1.0),
        host_gap_spec_us=(1200.0, 1.0),
    ),
)
#: the simulated backend runs the generic model's terms in waves
SIMULATED = replace(GENERIC, name="sim", waves=True)

SERVERS: Mapping[str, Server] = {
    each.name: each for each in (GENERIC, replace(GENERIC, name="sglang"), VLLM, ENGINE, SIMULATED)
}


def server_of(name: str, machine: Machine) -> Server:
    """The server called ``name`` on this machine; raises ``ValueError`` for an unknown one.

    On CPU ranks nothing is captured and no op is fused: counts and priors are the generic ones.
    """
    try:
        server = SERVERS[name]
    except KeyError:
        raise ValueError(f"server {name!r} is unknown; known: {', '.join(SERVERS)}") from None
    if machine.gpu is not None:
        return server
    return replace(GENERIC, name=name, waves=server.waves)
