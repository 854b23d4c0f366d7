"""Rows of ``bench/engine.py``: what one engine configuration does at one batch size.

Wall is (generate 257 tokens - generate 1) / steps through the public API, host work included; busy
is the GPU time of a cycle from events around its graphs; the floor is the weights touched / 4.2
TB/s.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.api import Engine
from engine.bench import random_prompts
from engine.config import LaunchConfig, SpeculationConfig
from engine.results import Request, RunResult

GRAPHS = {"decode": True, "draft": True, "verify": True, "extend": True, "prefill": True}
OFF = SpeculationConfig()
SHAPE = "qwen3-30b-a3b"
PROMPT_LEN, LONG, SHORT, WARM = 896, 257, 1, 65
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


def floors_ms(
    layers: int, sequences: int, distinct: float, speculation: SpeculationConfig, tp: int = 1
) -> dict[str, float]:
    """Least time of each part of a cycle: bytes that one GPU must read (bf16) / 4.2 TB/s.

    The target's parts as the issue's table counts them; of the head's, the draft steps after the
    first (whose token the extend has chosen) and the extend. Ranks share all but the router and the
    EAGLE head, which rank 0 has alone.
    """
    hidden, experts, width, vocab, heads, kv, dim = 2048, 128, 768, 151_936, 32, 4, 128
    dense = (heads + 2 * kv) * dim * hidden + heads * dim * hidden
    cache = 2 * kv * dim * 1024 * sequences
    values: dict[str, float] = {
        "attention": layers * (dense + cache) / tp,
        "moe": layers * (experts * hidden + distinct * 3 * hidden * width / tp),
        "head": vocab * hidden / tp,
    }
    if speculation.method != "off":
        wide, draft_vocab = 6144, 32_000
        step = dense + (heads + 2 * kv) * dim * hidden + 3 * hidden * wide
        step += draft_vocab * hidden + cache
        values |= {"draft": (speculation.steps - 1) * step, "extend": step + 3 * hidden * hidden}
    return {name: count * 2 / BANDWIDTH * 1e3 for name, count in values.items()}


def shares_of_floor(
    phases_ms: Mapping[str, float], floors: Mapping[str, float]
) -> dict[str, float]:
    """Each part's floor over its time; phases are named ``decode.moe``, ``draft``, and so on."""
    times = {name.rpartition(".")[2]: ms for name, ms in phases_ms.items()}
    return {name: round(ms / times[name], 3) for name, ms in floors.items() if times.get(name)}


def measure(
    engine: Engine, batch: int, speculation: SpeculationConfig, repeats: int
) -> dict[str, Any]:
    """One row of wall, busy and spread; every repeat has prompts of its own, as routing varies."""

    def wall(new: int, seed: int) -> tuple[float, RunResult]:
        asks = requests(batch, new, seed)
        start_s = time.perf_counter()
        run = engine.generate(asks, speculation, concurrency=batch)
        return time.perf_counter() - start_s, run

    # as many tokens as a flight of cycles and its capture need
    for new in (WARM, SHORT):
        wall(new, 0)
    longs, shorts = [], []
    for seed in range(1, repeats + 1):
        longs.append(wall(LONG, seed))
        shorts.append(wall(SHORT, seed)[0])
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
        "cycle_ms": statistics.median(r.cycle_ms for r in runs),
        "busy_ms": statistics.median(busies),
        "segments_ms": dict(last.segments_ms),
        "phases_ms": {n: round(ms, 4) for n, ms in last.phases_ms.items()},
        "steps": steps,
        "prefill_s": short_s,
        "accept_length": last.counters.accept_length,
        "distinct_experts": _mean([r.distinct_experts for r in runs]),
        "path": last.path,
        "graphs": dict(last.graphs),
        "repeats": repeats,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.mean(known) if known else None


def add_floors(
    row: dict[str, Any], layers: int, speculation: SpeculationConfig, tp: int = 1
) -> None:
    """The floor of the whole cycle and every part's share of its own."""
    if row["distinct_experts"] is not None:
        floors = floors_ms(layers, row["batch"], row["distinct_experts"], speculation, tp)
        row["floor_ms"] = sum(floors.values())
        row["shares_of_floor"] = shares_of_floor(row["phases_ms"], floors)


def plain_rows(
    emit: Emit, layers: int, batches: Sequence[int], repeats: int, name: str, **changes: Any
) -> None:
    """Plain decoding of a slice at several batch sizes in one engine."""
    start_s = time.perf_counter()
    with Engine(config(layers, max(batches), **changes)) as engine:
        emit(row="start", name=name, start_s=time.perf_counter() - start_s, notes=engine.notes)
        for batch in batches:
            row = measure(engine, batch, OFF, repeats)
            add_floors(row, layers, OFF, engine.config.tp)
            emit(row="decode", name=name, layers=layers, **row)
