"""Stage ``near_tie`` of ``bench/engine.py``: exactness of speculation for the tiny trained model.

In fp32 every output must equal plain decoding's. In bf16 plain decoding is compared with the exact
(fp32) model for the size of its noise, and each speculation's outputs with it: a first difference
must be within that noise or what plain decoding does with the text before it as a prompt, and the
others no more frequent than plain decoding's own (``autotune.backends.output_check``). Each
difference is reported with its place.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autotune.backends.output_check import (
    Forced,
    Place,
    Reference,
    check_output,
    self_noise,
)
from bench.engine_rows import GRAPHS, OFF
from bench.engine_tiny import tiny_config, tiny_requests
from bench.near_tie import Difference, Judged, first_differences, judge, margin_noise
from engine.api import Engine
from engine.config import SpeculationConfig
from engine.errors import EngineError
from engine.results import Request, RequestResult

KINDS = {
    "chain 3": SpeculationConfig(method="eagle3", steps=3, topk=1),
    "chain 5": SpeculationConfig(method="eagle3", steps=5, topk=1),
    "tree 5x2/12": SpeculationConfig(method="eagle3", steps=5, topk=2, draft_tokens=12),
}
NUM_REQUESTS, INPUT_LEN, NEW, AT_ONCE = 32, 128, 112, 16
#: sampled texts of one speculation that rounding may change
FEW_TEXTS = 2

Emit = Callable[..., None]


def stage_sampled(emit: Emit) -> None:
    """Sampling under graphs, fp32: speculation draws what plain decoding draws, token for token.

    A draw is a race of logits and noise: about one in 10^5 is so close that fp32's rounding by
    batch shape decides it, so up to ``FEW_TEXTS`` texts may part from plain decoding's.
    """
    asks = [
        replace(ask, temperature=0.8, seed=n) if n % 4 else ask
        for n, ask in enumerate(tiny_requests(NUM_REQUESTS, INPUT_LEN, NEW))
    ]
    wrong = 0
    with Engine(tiny_config(dtype="float32", cuda_graph=GRAPHS)) as engine:
        plain = engine.generate(asks, OFF, concurrency=AT_ONCE)
        greedy = engine.generate([replace(a, temperature=0.0) for a in asks], OFF).requests
        drawn = sum(a.token_ids != b.token_ids for a, b in zip(plain.requests, greedy, strict=True))
        for name, spec in {"off again": OFF, **KINDS}.items():
            run = engine.generate(asks, spec, concurrency=AT_ONCE)
            pairs = zip(plain.requests, run.requests, strict=True)
            same = sum(a.token_ids == b.token_ids for a, b in pairs)
            wrong += len(asks) - same > FEW_TEXTS
            emit(
                row="sampled",
                name=f"fp32, temperature 0.8, {name}",
                batch=AT_ONCE,
                same_outputs=f"{same}/{len(asks)}",
                differ_from_greedy=drawn,
                accept_length=run.counters.accept_length,
                cycle_ms=run.cycle_ms,
                path=run.path,
                graphs=dict(run.graphs),
            )
    if wrong:
        raise EngineError("crash", "bench", f"{wrong} speculations draw other texts than plain")


def stage_near_tie(emit: Emit) -> None:
    """Exact in fp32; in bf16 no difference beyond plain decoding's own noise."""
    asks = tiny_requests(NUM_REQUESTS, INPUT_LEN, NEW)
    with (
        Engine(tiny_config(dtype="float32", cuda_graph=GRAPHS)) as exact,
        Engine(tiny_config(cuda_graph=GRAPHS)) as rounded,
    ):
        wrong = _exact_rows(emit, exact, asks)
        exact_run = exact.generate(asks, OFF, concurrency=AT_ONCE, margins=True).requests
        plain = rounded.generate(asks, OFF, concurrency=AT_ONCE, margins=True).requests
        noise = self_noise(_reference(plain), [_reference(exact_run)])
        assert noise is not None
        _noise_row(emit, plain, exact_run, noise.epsilon)
        for name, spec in {"off, graphs": OFF, **KINDS}.items():
            run = rounded.generate(asks, spec, concurrency=AT_ONCE)
            outputs = [r.token_ids for r in run.requests]
            checked = check_output(
                outputs,
                _reference(plain),
                exact=False,
                temperature=0.0,
                noise=noise,
                force=partial(_force, rounded, asks),
            )
            wrong += checked.verdict not in ("exact", "near_tie")
            found = first_differences(plain, run.requests)
            judged = _judged(exact, asks, plain, found)
            emit(
                row="near tie",
                name=f"bf16 {name}",
                batch=AT_ONCE,
                same_outputs=f"{len(asks) - len(found)}/{len(asks)}",
                verdict=checked.verdict,
                reason=checked.reason,
                accept_length=run.counters.accept_length,
                largest_margin=max((j.margin for j in judged), default=0.0),
                beyond_best_two=sum(not j.best_two for j in judged),
                # request, position, plain token, speculative token, plain margin, exact margin
                differences=[
                    [*_place(j), plain[j.difference.request].margins[j.difference.position],
                     round(j.margin, 5), j.best_two]
                    for j in judged
                ],
            )  # fmt: skip
    if wrong:
        raise EngineError("crash", "bench", f"{wrong} outputs differ by more than rounding")


def _force(engine: Engine, asks: Sequence[Request], places: Sequence[Place]) -> list[Forced]:
    """Plain decoding's next token after each text, which is run as a prompt."""
    forced = [
        replace(asks[i], prompt_ids=(*asks[i].prompt_ids, *text), max_new_tokens=1)
        for i, text in places
    ]
    found = engine.generate(forced, OFF, concurrency=AT_ONCE, margins=True).requests
    return [Forced(r.token_ids[0], r.runners_up[0], r.margins[0]) for r in found]


def _reference(results: Sequence[RequestResult]) -> Reference:
    return Reference(tuple(r.token_ids for r in results), tuple(tuple(r.margins) for r in results))


def _noise_row(
    emit: Emit,
    plain: Sequence[RequestResult],
    exact: Sequence[RequestResult],
    epsilon: float,
) -> None:
    noise = sorted(margin_noise(exact, plain))
    margins = [m for r in plain for m in r.margins]
    emit(
        row="noise",
        name="bf16 margins against fp32",
        places=len(noise),
        median=statistics.median(noise),
        p99=noise[int(0.99 * len(noise))],
        largest=noise[-1],
        threshold=epsilon,
        # what a check of random places would let pass
        share_below_threshold=sum(m <= epsilon for m in margins) / len(margins),
    )


def _exact_rows(emit: Emit, exact: Engine, asks: list[Request]) -> int:
    plain = exact.generate(asks, OFF, concurrency=AT_ONCE).requests
    wrong = 0
    for name, spec in KINDS.items():
        run = exact.generate(asks, spec, concurrency=AT_ONCE)
        found = first_differences(plain, run.requests)
        wrong += len(found)
        emit(
            row="fp32 exact",
            name=f"fp32 {name}",
            batch=AT_ONCE,
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


def _place(judged: Judged) -> list[int]:
    d = judged.difference
    return [d.request, d.position, d.plain, d.other]
