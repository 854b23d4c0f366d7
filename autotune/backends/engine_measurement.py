"""From what the engine reports of its runs to the fields of a measurement.

The protocols name what is read of the engine's results, so that this file needs no engine.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Protocol

from autotune.records import Acceptance, PromptSample
from model.spec import Knobs


class Counts(Protocol):
    """``engine.results.Counters``."""

    @property
    def num_verifies(self) -> int: ...
    @property
    def num_drafted(self) -> int: ...
    @property
    def num_accepted(self) -> int: ...
    @property
    def accepted_by_depth(self) -> tuple[int, ...]: ...
    @property
    def histogram(self) -> tuple[int, ...]: ...
    @property
    def accepted_by_depth_rank(self) -> tuple[tuple[int, ...], ...]: ...


class Answer(Protocol):
    """``engine.results.RequestResult``."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def tokens_per_verify(self) -> tuple[int, ...]: ...
    @property
    def ttft_s(self) -> float: ...
    @property
    def decode_s(self) -> float: ...
    @property
    def tpot_ms(self) -> float | None: ...


class Run(Protocol):
    """``engine.results.RunResult``."""

    @property
    def requests(self) -> Sequence[Answer]: ...
    @property
    def counters(self) -> Counts: ...
    @property
    def decode_wall_s(self) -> float: ...
    @property
    def decode_tokens(self) -> int: ...
    @property
    def cycle_ms(self) -> float: ...
    @property
    def phases_ms(self) -> Mapping[str, float]: ...
    @property
    def distinct_experts(self) -> float | None: ...
    @property
    def peak_memory_bytes(self) -> int | None: ...


def measured(run: Run, knobs: Knobs) -> dict[str, Any]:
    """Fields of a measurement that the engine can see."""
    unknown = {}
    acceptance = None
    accept_length: float | None = 1.0
    if knobs.method == "off":
        unknown["acceptance"] = "speculation is off"
    else:
        acceptance = _acceptance(run.counters)
        accept_length = None
        if acceptance.num_verifies:
            accept_length = 1.0 + acceptance.num_accepted / acceptance.num_verifies
    tpots = [request.tpot_ms for request in run.requests if request.tpot_ms is not None]
    if not tpots:
        absent = ("tokens_per_s", "tpot_ms", "cycle_ms", "accept_length")
        unknown |= dict.fromkeys(absent, "nothing was decoded after the first token")
    decoded = bool(tpots) and run.decode_wall_s > 0
    if run.distinct_experts is None:
        unknown["distinct_experts"] = "no cycle was sampled for it (the engine does on a GPU)"
    if run.peak_memory_bytes is None:
        unknown["memory_gib"] = "no GPU is used, or its driver does not tell"
    return {
        "tokens_per_s": run.decode_tokens / run.decode_wall_s if decoded else None,
        "ttft_ms": median(request.ttft_s for request in run.requests) * 1e3,
        "tpot_ms": median(tpots) if tpots else None,
        "cycle_ms": run.cycle_ms if decoded else None,
        "terms_ms": dict(run.phases_ms) if decoded else {},
        "accept_length": accept_length if decoded else None,
        "acceptance": acceptance,
        "distinct_experts": run.distinct_experts,
        "memory_gib": None if run.peak_memory_bytes is None else run.peak_memory_bytes / 2**30,
        "prompts": tuple(
            PromptSample(
                prompt_index=index,
                output_tokens=len(request.token_ids),
                decode_s=request.decode_s,
                ttft_ms=request.ttft_s * 1e3,
                tokens_per_verify=request.tokens_per_verify,
            )
            for index, request in enumerate(run.requests)
        ),
        "unknown": unknown,
    }


def _acceptance(counts: Counts) -> Acceptance:
    return Acceptance(
        num_verifies=counts.num_verifies,
        num_drafted=counts.num_drafted,
        num_accepted=counts.num_accepted,
        accepted_by_depth=counts.accepted_by_depth,
        histogram=counts.histogram,
        accepted_by_depth_rank=counts.accepted_by_depth_rank,
    )
