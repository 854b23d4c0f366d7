"""What a foreign file tells about one run, as plain values; what it does not tell is missing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


def with_article(name: str) -> str:
    """ "an SGLang server log", "a vLLM server log": the indefinite article by how a name sounds."""
    return f"{'an' if name.startswith(('SGLang', 'exported')) else 'a'} {name}"


Format = Literal[
    "SGLang server log",
    "vLLM server log",
    "vLLM /metrics",
    "SGLang /metrics",
    "SGLang bench_serving JSONL",
    "vLLM bench serve JSON",
]

#: how a throughput was taken; only equal definitions are compared
Definition = Literal[
    #: tokens after the first, over the time of decoding
    "decode",
    #: a server's own figure over an interval in which it decoded only
    "server interval",
    #: a server's own figure over an interval that may hold prefill and idle time
    "server interval with gaps",
    #: all tokens over the duration of the benchmark, prefill included
    "wall clock",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One interval or request. ``running``: requests in the batch, None where not told."""

    running: int | None = None
    tokens_per_s: float | None = None
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    step_ms: float | None = None
    accept_length: float | None = None
    cuda_graph: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRun:
    """One run as one file shows it. Every field that the file does not show stays empty."""

    path: str
    format: Format
    #: of the server, as the file says it
    version: str | None = None
    model: str | None = None
    draft: str | None = None
    #: resolved arguments of the server (or of the benchmark), by name
    args: Mapping[str, Any] = field(default_factory=dict)
    #: settings by the dotted names of ``model.spec`` that the file shows
    knobs: Mapping[str, Any] = field(default_factory=dict)
    #: what the server says that it does: backends, graphs, transports
    effective: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, str] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    definition: Definition | None = None
    #: accepted drafts by depth (cumulative counts), and verifies; None where not told
    accepted_by_depth: tuple[float, ...] = ()
    num_verifies: float | None = None
    accept_length: float | None = None
    #: why the server ended badly, one line
    failure: str | None = None
    #: what a reader of the numbers must know
    notes: tuple[str, ...] = ()
    num_lines: int = 0
