"""Rows of ``bench/engine.py``: what one engine configuration does at one batch size.

Wall is (generate 257 tokens - generate 1) / steps through the public API, host work included; busy
is the GPU time of a cycle from events around its graphs; the floor is the weights touched / 4.2
TB/s.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.api import Engine
from engine.bench import random_prompts
from engine.config import LaunchConfig, SpeculationConfig
from engine.results import Request, RunResult

GRAPHS = {"decode": True, "draft": True, "verify": True, "extend": True, "prefill": True}
OFF = SpeculationConfig()
SHAPE = "qwen3-30b-a3b"
PROMPT_LEN, LONG, HALF, SHORT = 896, 257, 129, 1
#: room for the prompt, the output and a verify
MAX_CONTEXT = 1280
BANDWIDTH = 4.2e12
K3 = SpeculationConfig(method="eagle3", steps=3, topk=1, synthetic_acceptance=(1.0, 1.0, 0.0))

Emit = Callable[..., None]


def config(layers: int, batch: int, **changes: Any) -> LaunchConfig:
    """A slice of Qwen3-30B-A3B with random weights in bf16, all graphs on."""
    values: dict[str, Any] = {
        "target": {"shape": SHAPE, "weights": "random", "layers": layers},
        "device": "cuda",
        "dtype": "bfloat16",
        "max_context": MAX_CONTEXT,
        "max_concurrency": batch,
        "cuda_graph": GRAPHS,
        "timeout_s": 150.0,
    }
    return LaunchConfig.model_validate(values | changes)


def requests(batch: int, new: int, seed: int, vocab: int = 151_936) -> list[Request]:
    """Distinct random prompts."""
    return [
        Request(prompt_ids=ids, max_new_tokens=new, ignore_eos=True)
        for ids in random_prompts(batch, PROMPT_LEN, vocab, seed)
    ]


def floor_ms(layers: int, tokens: int, distinct: float) -> float:
    """Bytes that one forward must read (bf16) / 4.2 TB/s, as the issue's table counts them."""
    hidden, experts, width, vocab, heads, kv, dim = 2048, 128, 768, 151_936, 32, 4, 128
    layer: float = (heads + 2 * kv) * dim * hidden + heads * dim * hidden + experts * hidden
    layer += distinct * 3 * hidden * width
    cache = 2 * kv * dim * 1024 * tokens
    return (layers * (layer + cache) + vocab * hidden) * 2 / BANDWIDTH * 1e3


def measure(
    engine: Engine, batch: int, speculation: SpeculationConfig, repeats: int, seed: int = 1
) -> dict[str, Any]:
    """One row of wall, busy and spread."""
    asks = {new: requests(batch, new, seed) for new in (LONG, HALF, SHORT)}

    def wall(new: int) -> tuple[float, RunResult]:
        start_s = time.perf_counter()
        run = engine.generate(asks[new], speculation, concurrency=batch)
        return time.perf_counter() - start_s, run

    for new in (LONG, SHORT):
        wall(new)
    longs, halves, shorts = [], [], []
    for _ in range(repeats):
        longs.append(wall(LONG))
        halves.append(wall(HALF))
        shorts.append(wall(SHORT)[0])
    runs = [run for _, run in longs]
    steps = runs[0].num_cycles
    short_s = statistics.median(shorts)
    walls = [(s - short_s) * 1e3 / run.num_cycles for s, run in longs]
    last = runs[-1]
    busies = [sum(ms for n, ms in r.segments_ms.items() if n != "host_gap") for r in runs]
    return {
        "batch": batch,
        "wall_ms": statistics.median(walls),
        "wall_low_ms": min(walls),
        "wall_high_ms": max(walls),
        # between two runs that both decode: the prefill's scatter has less weight
        "late_wall_ms": statistics.median(
            (long_s - half_s) * 1e3 / (long.num_cycles - half.num_cycles)
            for (long_s, long), (half_s, half) in zip(longs, halves, strict=True)
        ),
        "cycle_ms": statistics.median(r.cycle_ms for r in runs),
        "busy_ms": statistics.median(busies),
        "segments_ms": dict(last.segments_ms),
        "phases_ms": {n: round(ms, 4) for n, ms in last.phases_ms.items()},
        "steps": steps,
        "prefill_s": short_s,
        "accept_length": last.counters.accept_length,
        "distinct_experts": last.distinct_experts,
        "path": last.path,
        "graphs": dict(last.graphs),
        "repeats": repeats,
    }


def plain_rows(
    emit: Emit, layers: int, batches: Sequence[int], repeats: int, name: str, **changes: Any
) -> None:
    """Plain decoding of a slice at several batch sizes in one engine."""
    start_s = time.perf_counter()
    with Engine(config(layers, max(batches), **changes)) as engine:
        emit(row="start", name=name, start_s=time.perf_counter() - start_s, notes=engine.notes)
        for batch in batches:
            row = measure(engine, batch, OFF, repeats)
            if row["distinct_experts"] is not None:
                row["floor_ms"] = floor_ms(layers, batch, row["distinct_experts"])
            emit(row="decode", name=name, layers=layers, **row)
