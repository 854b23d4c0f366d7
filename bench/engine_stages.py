"""Stages of ``bench/engine.py``: each runs in a process of its own and writes rows as they come."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.engine_exchange import stage_exchange
from bench.engine_half import stage_half
from bench.engine_near_tie import stage_near_tie, stage_sampled
from bench.engine_peers import (
    stage_peer8,
    stage_unpack,
    stage_vllm8,
    stage_vllm48,
    stage_vllm48eagle,
    stage_vllm_eagle_start,
    stage_vllm_start,
    stage_vllm_wait,
)
from bench.engine_profile import stage_profile
from bench.engine_rows import (
    GRAPHS,
    K3,
    OFF,
    Emit,
    add_floors,
    config,
    measure,
    plain_rows,
    requests,
)
from bench.engine_tiny import stage_diagnose, stage_fp32, stage_tiny
from bench.engine_tp import (
    stage_tp2,
    stage_tp2_one_gpu,
    stage_tp2ll,
    stage_tp2nvlink,
    stage_tp2spec,
    stage_tp2tiny,
)
from bench.engine_variants import stage_variants48
from bench.engine_warm import (
    stage_compile_all,
    stage_warm,
    stage_warm_all,
    stage_warm_near_tie,
    stage_warm_tiny,
    stage_warm_tp2,
)
from engine.api import Engine
from engine.errors import EngineError


def stage_q8(emit: Emit) -> None:
    """8 layers, the issue's four sizes."""
    plain_rows(emit, 8, (1, 4, 16, 64), 2, "8 layers")


def stage_q8fused(emit: Emit) -> None:
    """The same with the fused kernels for every dense weight."""
    plain_rows(emit, 8, (64,), 2, "8 layers, fused", environment={"AUTOTUNE_LINEAR": "fused"})


def stage_q8joined(emit: Emit) -> None:
    """The same with the output projection and the router as one kernel."""
    plain_rows(
        emit, 8, (1, 4, 16), 3, "8 layers, joined", environment={"AUTOTUNE_ROUTER": "joined"}
    )


def stage_q8pdl(emit: Emit) -> None:
    """The same with programmatic dependent launch."""
    plain_rows(emit, 8, (1, 4, 16), 3, "8 layers, PDL", environment={"AUTOTUNE_PDL": "1"})


def stage_q48(emit: Emit) -> None:
    """The whole model: plain, and the speculative cycle with its spread."""
    whole_model(emit, "48 layers", {})


def stage_q48pdl(emit: Emit) -> None:
    """The whole model with programmatic dependent launch."""
    whole_model(emit, "48 layers, PDL", {"environment": {"AUTOTUNE_PDL": "1"}})


def whole_model(emit: Emit, name: str, changes: dict[str, Any]) -> None:
    """Plain decoding at 1 and 4, then EAGLE-3 cycles of k = 3."""
    start_s = time.perf_counter()
    with Engine(config(48, 4, draft={"weights": "random"}, **changes)) as engine:
        emit(row="start", name=name, start_s=time.perf_counter() - start_s)
        for batch, spec in ((1, OFF), (4, OFF), (1, K3), (4, K3)):
            row = measure(engine, batch, spec, 3)
            add_floors(row, 48, spec)
            emit(row="decode" if spec is OFF else "eagle3 k=3", name=name, layers=48, **row)
        verifies = [
            engine.generate(requests(1, 130, seed), K3, concurrency=1).segments_ms["verify"]
            for seed in range(5)
        ]
        emit(
            row="verify spread",
            name=f"{name}, verify of 4 captured",
            verify_ms=verifies,
            spread=(max(verifies) - min(verifies)) / statistics.median(verifies),
        )


def stage_timing(emit: Emit) -> None:
    """What measuring the phases costs a step: with and without, taking turns."""
    for layers, batch, spec in ((8, 1, OFF), (8, 4, OFF), (8, 1, K3)):
        draft = {} if spec is OFF else {"draft": {"weights": "random"}}
        with Engine(config(layers, batch, **draft)) as engine:
            asks = requests(batch, 257, 1)
            engine.generate(asks, spec, concurrency=batch)
            found: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(12):
                for timed in (turn % 2 == 0, turn % 2 == 1):
                    run = engine.generate(asks, spec, concurrency=batch, timed=timed)
                    found[timed].append(run.cycle_ms)
        on_ms, off_ms = statistics.median(found[True]), statistics.median(found[False])
        emit(
            row="phase timing",
            name=f"{layers} layers, {'plain' if spec is OFF else 'k=3'}",
            batch=batch,
            on_ms=on_ms,
            off_ms=off_ms,
            cost=on_ms / off_ms - 1,
            all_on_ms=found[True],
            all_off_ms=found[False],
        )


def stage_q48eager(emit: Emit) -> None:
    """The same verify with its graph off."""
    graphs = GRAPHS | {"verify": False}
    with Engine(config(48, 1, draft={"weights": "random"}, cuda_graph=graphs)) as engine:
        row = measure(engine, 1, K3, 2)
        emit(row="eagle3 k=3", name="48 layers, verify eager", layers=48, **row)


STAGES: dict[str, tuple[Callable[[Emit], None], float]] = {
    # name -> (stage, timeout in seconds)
    "warm": (stage_warm, 100),
    "warm_all": (stage_warm_all, 120),
    "warm_tiny": (stage_warm_tiny, 120),
    "warm_near_tie": (stage_warm_near_tie, 60),
    "warm_tp2": (stage_warm_tp2, 100),
    "compile_all": (stage_compile_all, 110),
    "q8": (stage_q8, 90),
    "q48": (stage_q48, 110),
    "fp32": (stage_fp32, 90),
    "tiny": (stage_tiny, 90),
    "diagnose": (stage_diagnose, 60),
    "q48eager": (stage_q48eager, 60),
    "profile": (stage_profile, 90),
    "timing": (stage_timing, 60),
    "variants48": (stage_variants48, 80),
    "near_tie": (stage_near_tie, 90),
    "sampled": (stage_sampled, 60),
    "peer8": (stage_peer8, 80),
    "unpack": (stage_unpack, 60),
    "vllm_start": (stage_vllm_start, 60),
    "vllm_wait": (stage_vllm_wait, 160),
    "vllm8": (stage_vllm8, 155),
    "vllm48": (stage_vllm48, 155),
    "vllm_eagle_start": (stage_vllm_eagle_start, 30),
    "vllm48eagle": (stage_vllm48eagle, 170),
    "q8fused": (stage_q8fused, 60),
    "q8joined": (stage_q8joined, 60),
    "q8pdl": (stage_q8pdl, 60),
    "q48pdl": (stage_q48pdl, 80),
    "exchange": (stage_exchange, 30),
    "half": (stage_half, 40),
    "tp2": (stage_tp2, 80),
    "tp2nvlink": (stage_tp2nvlink, 40),
    "tp2ll": (stage_tp2ll, 40),
    "tp2spec": (stage_tp2spec, 110),
    "tp2tiny": (stage_tp2tiny, 80),
    "tp2_one_gpu": (stage_tp2_one_gpu, 90),
}


def run_stage(name: str, out: Path) -> None:
    """Run one stage in this process, appending rows to ``<out>/engine.jsonl``."""

    def emit(**row: Any) -> None:
        line = json.dumps({"stage": name, **row})
        with (out / "engine.jsonl").open("a") as file:
            file.write(line + "\n")
        show(row)

    try:
        STAGES[name][0](emit)
    except EngineError as error:
        emit(row="failure", name=name, error=error.message, log=error.log_tail[-3500:])
        raise SystemExit(1) from None


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    parts = [f"{row.get('name', ''):<34} {row.get('row', ''):<12}"]
    for key in (
        "batch", "wall_ms", "wall_low_ms", "wall_high_ms", "cycle_ms", "busy_ms", "floor_ms",
        "shares_of_floor", "distinct_experts", "accept_length", "tokens_per_s", "speedup",
        "same_outputs",
        "start_s", "prefill_s", "verify_ms", "spread", "rc", "error", "eager_ms", "captured_ms",
        "on_ms", "off_ms", "cost", "prefill_ms", "long_ms", "decode_ms", "outside_decode_ms",
        "busy_us", "span_us", "num_kernels", "kernels_per_step", "segments_ms", "places",
        "threshold", "share_below_threshold", "largest", "largest_margin",
        "beyond_best_two", "verdict", "reason", "output", "output_reason", "median", "p99",
        "seconds",
    ):  # fmt: skip
        value = row.get(key)
        if value is not None:
            shown = f"{value:.3f}" if isinstance(value, float) else str(value)[:300]
            parts.append(f"{key.removesuffix('_ms')}={shown}")
    eager = [f"{n}: {how}" for n, how in row.get("graphs", {}).items() if how != "captured"]
    if eager:
        parts.append(f"NOT CAPTURED {eager}"[:400])
    if row.get("rc") or row.get("log"):
        parts.append(f"\n{row.get('tail') or row.get('log')}")
    parts += [f"\n    {line}" for line in row.get("lines", [])]
    print(" ".join(parts), flush=True)
