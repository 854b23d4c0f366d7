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
    def num_cycles(self) -> int: ...
    @property
    def cycle_ms(self) -> float: ...
    @property
    def phases_ms(self) -> Mapping[str, float]: ...


def measured(results: Sequence[Run], knobs: Knobs) -> dict[str, Any]:
    """Fields of a measurement that the engine can see, over the batches of one repeat."""
    requests = [request for result in results for request in result.requests]
    cycles = sum(result.num_cycles for result in results)
    wall_s = sum(result.decode_wall_s for result in results)
    tokens = sum(result.decode_tokens for result in results)
    unknown = {}
    terms = {}
    if cycles:
        names = {name for result in results for name in result.phases_ms}
        terms = {
            name: sum(r.phases_ms.get(name, 0.0) * r.num_cycles for r in results) / cycles
            for name in sorted(names)
        }
    acceptance = None
    if knobs.method == "off":
        unknown["acceptance"] = "speculation is off"
    else:
        acceptance = _acceptance([result.counters for result in results])
    tpots = [request.tpot_ms for request in requests if request.tpot_ms is not None]
    if not wall_s:
        unknown["tokens_per_s"] = "nothing was decoded after the first token"
    return {
        "tokens_per_s": tokens / wall_s if wall_s else None,
        "ttft_ms": median(request.ttft_s for request in requests) * 1e3,
        "tpot_ms": median(tpots) if tpots else None,
        "cycle_ms": sum(r.cycle_ms * r.num_cycles for r in results) / cycles if cycles else None,
        "terms_ms": terms,
        "accept_length": 1.0 if acceptance is None else _accept_length(acceptance),
        "acceptance": acceptance,
        "prompts": tuple(_sample(index, request) for index, request in enumerate(requests)),
        "unknown": unknown,
    }


def _sample(index: int, request: Answer) -> PromptSample:
    return PromptSample(
        prompt_index=index,
        output_tokens=len(request.token_ids),
        decode_s=request.decode_s,
        ttft_ms=request.ttft_s * 1e3,
        tokens_per_verify=request.tokens_per_verify,
    )


def _accept_length(acceptance: Acceptance) -> float | None:
    if not acceptance.num_verifies:
        return None
    return 1.0 + acceptance.num_accepted / acceptance.num_verifies


def _acceptance(parts: Sequence[Counts]) -> Acceptance:
    """Counts of several batches together; shorter tuples are padded with zeros."""

    def added(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
        width = max((len(row) for row in rows), default=0)
        return tuple(sum(row[i] for row in rows if i < len(row)) for i in range(width))

    by_rank = [part.accepted_by_depth_rank for part in parts]
    depths = max((len(table) for table in by_rank), default=0)
    return Acceptance(
        num_verifies=sum(part.num_verifies for part in parts),
        num_drafted=sum(part.num_drafted for part in parts),
        num_accepted=sum(part.num_accepted for part in parts),
        accepted_by_depth=added([part.accepted_by_depth for part in parts]),
        histogram=added([part.histogram for part in parts]),
        accepted_by_depth_rank=tuple(
            added([table[depth] for table in by_rank if depth < len(table)])
            for depth in range(depths)
        ),
    )
