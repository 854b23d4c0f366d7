"""One running request on rank 0, and the acceptance counters of a run."""

from time import perf_counter

import numpy as np

from engine.config import SpeculationConfig
from engine.results import Counters, Request, RequestResult


class Sequence:
    """A request in a slot: its tokens so far and what is settled in the caches."""

    def __init__(self, index: int, request: Request, slot: int, eos_ids: tuple[int, ...]) -> None:
        self.index, self.request, self.slot = index, request, slot
        self.tokens: list[int] = []
        self.tokens_per_verify: list[int] = []
        self.margins: list[float] = []
        self.runners_up: list[int] = []
        #: rows settled in the caches: all tokens but the last one
        self.prefix = 0
        self.admitted_s = perf_counter()
        self.ttft_s = 0.0
        self.decode_s = 0.0
        self.finish_reason: str | None = None
        self._eos = () if request.ignore_eos else eos_ids
        self._random = np.random.Generator(np.random.Philox(request.seed))

    @property
    def last(self) -> int:
        """The last token, whose row is not in the caches yet."""
        return self.tokens[-1]

    def uniforms(self, count: int) -> list[float]:
        """The next random numbers of this request; none are drawn for a greedy one."""
        if self.request.temperature <= 0:
            return [0.0] * count
        return [float(u) for u in self._random.random(count)]

    def emit(self, tokens: list[int]) -> int:
        """Append what fits, set ``finish_reason`` at the end; returns how many were delivered."""
        delivered = 0
        if not self.tokens:
            self.ttft_s = perf_counter() - self.admitted_s
        for token in tokens:
            self.tokens.append(token)
            delivered += 1
            if token in self._eos:
                self.finish_reason = "eos"
                break
            if len(self.tokens) >= self.request.max_new_tokens:
                self.finish_reason = "length"
                break
        return delivered

    def result(self) -> RequestResult:
        """The finished request."""
        assert self.finish_reason is not None
        return RequestResult(
            token_ids=tuple(self.tokens),
            finish_reason=self.finish_reason,
            tokens_per_verify=tuple(self.tokens_per_verify),
            ttft_s=self.ttft_s,
            decode_s=self.decode_s,
            margins=tuple(self.margins),
            runners_up=tuple(self.runners_up),
        )


class Tally:
    """Counts what verifies accept, before outputs are cut (as vLLM counts)."""

    def __init__(self, speculation: SpeculationConfig) -> None:
        steps = speculation.steps if speculation.method != "off" else 0
        self._num_drafts = speculation.num_tokens - 1
        self._histogram = [0] * (steps + 1)
        self._by_depth_rank = [[0] * max(speculation.topk, 1) for _ in range(steps)]

    def add(self, ranks: list[int]) -> None:
        """One verify; ``ranks`` of the accepted nodes, from depth 1 down."""
        self._histogram[len(ranks)] += 1
        for depth, rank in enumerate(ranks):
            self._by_depth_rank[depth][rank] += 1

    def counters(self) -> Counters:
        """All counts so far."""
        histogram = self._histogram
        num_verifies = sum(histogram) if len(histogram) > 1 else 0
        return Counters(
            num_verifies=num_verifies,
            num_drafted=num_verifies * self._num_drafts,
            num_accepted=sum(n * count for n, count in enumerate(histogram)),
            accepted_by_depth=tuple(sum(histogram[d:]) for d in range(1, len(histogram))),
            histogram=tuple(histogram) if num_verifies else (),
            accepted_by_depth_rank=tuple(tuple(row) for row in self._by_depth_rank),
        )
