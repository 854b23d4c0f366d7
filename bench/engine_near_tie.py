"""Stage ``near_tie`` of ``bench/engine.py``: exactness of speculation for the tiny trained model.

In fp32 every output must equal plain decoding's. In bf16 the first difference of each request must
be a near-tie (``bench.near_tie``), and each is reported.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.engine_rows import GRAPHS, OFF
from bench.engine_tiny import tiny_config, tiny_requests
from bench.near_tie import (
    Difference,
    Judged,
    first_differences,
    judge,
    margin_noise,
    threshold_of,
)
from engine.api import Engine
from engine.config import SpeculationConfig
from engine.errors import EngineError
from engine.results import Request, RequestResult

KINDS = {
    "chain 3": SpeculationConfig(method="eagle3", steps=3, topk=1),
    "chain 5": SpeculationConfig(method="eagle3", steps=5, topk=1),
    "tree 5x2/12": SpeculationConfig(method="eagle3", steps=5, topk=2, draft_tokens=12),
}
NUM_REQUESTS, INPUT_LEN, NEW, AT_ONCE = 32, 128, 128, 16

Emit = Callable[..., None]


def stage_near_tie(emit: Emit) -> None:
    """Exact in fp32; in bf16 every first difference at a near-tie."""
    asks = tiny_requests(NUM_REQUESTS, INPUT_LEN, NEW)
    with (
        Engine(tiny_config(dtype="float32", cuda_graph=GRAPHS)) as exact,
        Engine(tiny_config(cuda_graph=GRAPHS)) as rounded,
    ):
        wrong = _exact_rows(emit, exact, asks)
        exact_run = exact.generate(asks, OFF, concurrency=AT_ONCE, margins=True)
        rounded_run = rounded.generate(asks, OFF, concurrency=AT_ONCE, margins=True)
        noise = margin_noise(exact_run.requests, rounded_run.requests)
        threshold = threshold_of(noise)
        margins = [m for r in exact_run.requests for m in r.margins]
        emit(
            row="noise",
            name="bf16 margins against fp32",
            places=len(noise),
            median=statistics.median(noise),
            p99=sorted(noise)[int(0.99 * len(noise))],
            largest=max(noise),
            threshold=threshold,
            # what a check of random places would let pass
            share_below_threshold=sum(m <= threshold for m in margins) / len(margins),
        )
        plain = rounded.generate(asks, OFF, concurrency=AT_ONCE).requests
        for name, spec in {"off, one at a time": OFF, **KINDS}.items():
            at_once = 1 if spec is OFF else AT_ONCE
            run = rounded.generate(asks, spec, concurrency=at_once)
            found = first_differences(plain, run.requests)
            judged = _judged(exact, asks, plain, found)
            far = [j for j in judged if not j.is_near_tie(threshold)]
            wrong += len(far)
            emit(
                row="near tie",
                name=f"bf16 {name}",
                batch=at_once,
                same_outputs=f"{len(asks) - len(found)}/{len(asks)}",
                accept_length=run.counters.accept_length,
                largest_margin=max((j.margin for j in judged), default=0.0),
                not_near_ties=[_row(j) for j in far],
                differences=[_row(j) for j in judged],
            )
    if wrong:
        raise EngineError("crash", "bench", f"{wrong} outputs differ by more than rounding")


def _exact_rows(emit: Emit, exact: Engine, asks: list[Request]) -> int:
    plain = exact.generate(asks, OFF, concurrency=1).requests
    wrong = 0
    for name, spec in {"off": OFF, **KINDS}.items():
        for at_once in (1, AT_ONCE):
            run = exact.generate(asks, spec, concurrency=at_once)
            found = first_differences(plain, run.requests)
            wrong += len(found)
            emit(
                row="fp32 exact",
                name=f"fp32 {name}",
                batch=at_once,
                same_outputs=f"{len(asks) - len(found)}/{len(asks)}",
                differences=[[d.request, d.position, d.plain, d.other] for d in found],
                accept_length=run.counters.accept_length,
                graphs=dict(run.graphs),
            )
    return wrong


def _judged(
    exact: Engine,
    asks: Sequence[Request],
    plain: Sequence[RequestResult],
    found: Sequence[Difference],
) -> list[Judged]:
    """Each difference beside the exact model's view of its place."""
    if not found:
        return []
    places = [
        replace(
            asks[d.request],
            prompt_ids=(*asks[d.request].prompt_ids, *plain[d.request].token_ids[: d.position]),
            max_new_tokens=1,
        )
        for d in found
    ]
    forced = exact.generate(places, OFF, concurrency=AT_ONCE, margins=True).requests
    return [judge(d, f) for d, f in zip(found, forced, strict=True)]


def _row(judged: Judged) -> list[object]:
    d = judged.difference
    return [d.request, d.position, d.plain, d.other, round(judged.margin, 5), judged.best_two]
