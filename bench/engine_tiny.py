"""The tiny trained model's stages of ``bench/engine.py``: speed-ups, exactness, configurations."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.backends.output_check import (
    Checked,
    Forced,
    Place,
    Reference,
    check_output,
    probe_places,
    self_noise,
    with_forced,
)
from engine.api import Engine
from engine.config import LaunchConfig, SpeculationConfig
from engine.errors import EngineError
from engine.results import Request, RunResult

TINY = Path(__file__).resolve().parent.parent / "studies" / "models"
GRAPHS = {"decode": True, "draft": True, "verify": True, "extend": True}
OFF = SpeculationConfig()
#: measured rounds over all kinds, requests at the largest load, tokens of each
ROUNDS, NUM_REQUESTS, NEW = 4, 32, 128
#: requests on which plain decoding shows its own noise
NOISE_PROMPTS = 4
LOADS = (1, 4, 16)

TINY_KINDS = {
    "off": OFF,
    "chain 3": SpeculationConfig(method="eagle3", steps=3, topk=1),
    "chain 5": SpeculationConfig(method="eagle3", steps=5, topk=1),
    "tree 3x2/8": SpeculationConfig(method="eagle3", steps=3, topk=2, draft_tokens=8),
    "tree 3x4/16": SpeculationConfig(method="eagle3", steps=3, topk=4, draft_tokens=16),
}

Emit = Callable[..., None]


def stage_tiny(emit: Emit) -> None:
    """The trained tiny model end to end: plain, chain and tree at three loads."""
    tiny_rows(emit, "tiny", {})


def tiny_config(**changes: Any) -> LaunchConfig:
    """The trained pair in bf16."""
    values: dict[str, Any] = {
        "target": {"path": str(TINY / "tiny-moe")},
        "draft": {"path": str(TINY / "tiny-moe-eagle3")},
        "device": "cuda",
        "dtype": "bfloat16",
        "max_context": 512,
        "max_concurrency": 16,
        "cuda_graph": GRAPHS,
        "timeout_s": 120.0,
    }
    return LaunchConfig.model_validate(values | changes)


def tiny_requests(count: int, input_len: int, new: int) -> list[Request]:
    """Held-out code prompts."""
    from autotune.prompts import load_prompts

    prompts = load_prompts("builtin:code", TINY / "tiny-moe", input_len, count, 0)
    return [
        Request(prompt_ids=tuple(ids), max_new_tokens=new, ignore_eos=True)
        for ids in prompts.token_ids
    ]


def tiny_rows(emit: Emit, name: str, changes: dict[str, Any]) -> None:
    """Interleaved repeats of plain, chain and tree decoding at three loads.

    Every second round runs the kinds backwards, so that drift falls on all alike. A kind that
    kills the workers is left out of the rest, and said.
    """
    kinds = dict(TINY_KINDS)
    asks = tiny_requests(NUM_REQUESTS, 128, NEW)
    start_s = time.perf_counter()
    engine = Engine(tiny_config(**changes))
    try:
        truth = Truth(engine, asks, max(LOADS))
        start_s = _spent(emit, f"{name}: start and plain decoding with margins", start_s)
        for concurrency in LOADS:
            some = asks[: max(4, 2 * concurrency)]
            runs: dict[str, list[RunResult]] = {kind: [] for kind in kinds}
            # round 0 warms up
            for number in range(1 + ROUNDS):
                for kind in list(kinds)[:: -1 if number % 2 else 1]:
                    try:
                        run = engine.generate(some, kinds[kind], concurrency=concurrency)
                    except EngineError as error:
                        emit(
                            row="failure",
                            name=f"{name}, {kind}",
                            batch=concurrency,
                            error=error.message[:300],
                            log=error.log_tail[-2500:],
                        )
                        del kinds[kind]
                        engine.close()
                        engine = truth.engine = Engine(tiny_config(**changes))
                        continue
                    if number:
                        runs[kind].append(run)
            start_s = _spent(emit, f"{name}: rounds at {concurrency}", start_s)
            tiny_level(emit, name, concurrency, {k: runs[k] for k in kinds}, truth)
            start_s = _spent(emit, f"{name}: judging at {concurrency}", start_s)
    finally:
        engine.close()


def _spent(emit: Emit, name: str, since_s: float) -> float:
    """Emit what a part of the stage took; returns when the next one begins."""
    now_s = time.perf_counter()
    emit(row="spent", name=name, seconds=now_s - since_s)
    return now_s


class Truth:
    """Plain decoding of the prompts by the same engine, to judge outputs by (``output_check``).

    Made once, at the largest load: margins take the host in every step, hundreds of times the wait
    of a measured one. What another load rounds differently is part of the noise, which a few of the
    prompts show by being decoded again, alone, and as prompts.
    """

    def __init__(self, engine: Engine, asks: list[Request], concurrency: int) -> None:
        self.engine, self.asks = engine, asks
        self.reference = self._plain(asks, concurrency)
        few = asks[:NOISE_PROMPTS]
        noise = self_noise(self.reference, (self._plain(few, concurrency), self._plain(few[:1], 1)))
        assert noise is not None
        places = probe_places(self.reference, len(asks[0].prompt_ids))
        self.noise = with_forced(noise, self.reference, places, self._forced(places))

    def _plain(self, asks: list[Request], concurrency: int) -> Reference:
        run = self.engine.generate(asks, OFF, concurrency=concurrency, margins=True)
        return Reference(
            tuple(r.token_ids for r in run.requests),
            tuple(r.margins for r in run.requests),
            tuple(r.runners_up for r in run.requests),
        )

    def _forced(self, places: Sequence[Place]) -> list[Forced]:
        if not places:
            return []
        asks = [
            Request(
                prompt_ids=(*self.asks[index].prompt_ids, *text), max_new_tokens=1, ignore_eos=True
            )
            for index, text in places
        ]
        found = self._plain(asks, 1)
        assert found.margins is not None
        assert found.seconds is not None
        return [
            Forced(found.tokens[number][0], found.seconds[number][0], found.margins[number][0])
            for number in range(len(places))
        ]

    def check(self, run: RunResult) -> Checked:
        """Whether the outputs of the first prompts are those of plain decoding, but for ties."""
        outputs = [r.token_ids for r in run.requests]
        return check_output(
            outputs,
            self.reference.prefix(len(outputs)),
            exact=False,
            temperature=0.0,
            noise=self.noise,
            force=self._forced,
        )


def tiny_level(
    emit: Emit, name: str, concurrency: int, runs: dict[str, list[RunResult]], truth: Truth
) -> None:
    """Rows of one load: medians, speed-ups over plain decoding, outputs judged.

    ``speedup_low`` and ``speedup_high`` are over the rounds, each against plain decoding of the
    same round.
    """
    plain_rates = [r.tokens_per_s or 0.0 for r in runs["off"]]
    base = statistics.median(plain_rates)
    plain = [r.token_ids for r in runs["off"][-1].requests]
    for kind, found in runs.items():
        run, rates = found[-1], [r.tokens_per_s or 0.0 for r in found]
        ratios = [rate / other for rate, other in zip(rates, plain_rates, strict=False)]
        same = sum(r.token_ids == p for r, p in zip(run.requests, plain, strict=True))
        checked = truth.check(run)
        emit(
            row="tiny",
            name=f"{name}, {kind}",
            batch=concurrency,
            n=len(found),
            tokens_per_s=statistics.median(rates),
            low=min(rates),
            high=max(rates),
            speedup=statistics.median(rates) / base,
            speedup_low=min(ratios),
            speedup_high=max(ratios),
            accept_length=run.counters.accept_length,
            same_outputs=f"{same}/{len(plain)}",
            output=checked.verdict,
            output_reason=checked.reason,
            cycle_ms=run.cycle_ms,
            busy_ms=sum(m for n, m in run.segments_ms.items() if n != "host_gap"),
            memory_gib=(run.peak_memory_bytes or 0) / 2**30,
            phases_ms={n: round(ms, 4) for n, ms in run.phases_ms.items()},
            graphs=dict(run.graphs),
        )


def stage_diagnose(emit: Emit) -> None:
    """Which kernel of the tiny model faults: every launch waits, no graphs; then memcheck."""
    changes = {"environment": {"CUDA_LAUNCH_BLOCKING": "1"}, "cuda_graph": {}}
    asks = tiny_requests(2, 64, 12)
    for dtype in ("bfloat16", "float32"):
        for steps, topk, tokens in ((5, 1, 6), (5, 2, 12), (2, 1, 3)):
            spec = SpeculationConfig(method="eagle3", steps=steps, topk=topk, draft_tokens=tokens)
            name = f"{dtype} {steps}/{topk}/{tokens}"
            try:
                with Engine(tiny_config(dtype=dtype, **changes)) as engine:
                    for concurrency in (1, 2):
                        engine.generate(asks, spec, concurrency=concurrency)
                emit(row="diagnose", name=name, error="none")
            except EngineError as error:
                tail = error.log_tail[-3500:]
                emit(row="diagnose", name=name, error=error.message[:200], log=tail)


def stage_fp32(emit: Emit) -> None:
    """Tiny model in fp32: speculation with graphs equals plain decoding token for token."""
    asks = tiny_requests(4, 64, 96)
    with Engine(tiny_config(dtype="float32", max_concurrency=4)) as engine:
        plain = engine.generate(asks, OFF, concurrency=1)
        for steps, topk, tokens in ((3, 1, 4), (3, 4, 16), (3, 2, 8), (7, 1, 8), (5, 2, 12)):
            spec = SpeculationConfig(method="eagle3", steps=steps, topk=topk, draft_tokens=tokens)
            run = engine.generate(asks, spec, concurrency=4)
            pairs = zip(run.requests, plain.requests, strict=True)
            same = sum(a.token_ids == b.token_ids for a, b in pairs)
            emit(
                row="fp32",
                name=f"fp32 {steps}/{topk}/{tokens}",
                batch=4,
                same_outputs=f"{same}/{len(asks)}",
                accept_length=run.counters.accept_length,
                graphs=dict(run.graphs),
            )
        margins = engine.generate(asks[:2], OFF, concurrency=2, margins=True)
        same = sum(
            a.token_ids == b.token_ids
            for a, b in zip(margins.requests, plain.requests, strict=False)
        )
        emit(row="fp32", name="fp32 stepwise", batch=2, same_outputs=f"{same}/2", path=margins.path)
