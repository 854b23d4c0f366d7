"""Stages of ``bench/engine.py``: each runs in a process of its own and writes rows as they come.

A row is what one engine configuration does at one batch size. Wall is (generate 257 tokens -
generate 1) / steps through the public API, host work included; busy is the GPU time of a cycle from
events around its graphs; the floor is the weights touched / 4.2 TB/s.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.engine_tiny import (
    GRAPHS,
    OFF,
    TINY_KINDS,
    stage_diagnose,
    stage_fp32,
    stage_tiny,
    tiny_rows,
)
from engine.api import Engine
from engine.bench import random_prompts
from engine.config import LaunchConfig, SpeculationConfig
from engine.errors import EngineError
from engine.results import Request, RunResult

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


def stage_warm(emit: Emit) -> None:
    """Compile kernels for all sizes at once, in parallel, into Triton's cache."""
    root = Path(__file__).resolve().parent.parent
    head = (
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "import bench.engine_stages as s\n"
        "import bench.engine_tiny as t\n"
        "from engine.api import Engine\n"
    )
    slices = (
        "with Engine(s.config(4, 64, draft={{'weights': 'random'}})) as e:\n"
        "    e.generate(s.requests({batch}, 6, 1), s.{spec}, concurrency={batch})\n"
    )
    tiny = (
        "asks = t.tiny_requests(16, 128, 40)\n"
        "with Engine(t.tiny_config()) as e:\n"
        "    for n in (1, 4, 16): e.generate(asks[:n], t.TINY_KINDS[{kind!r}], concurrency=n)\n"
    )
    sizes = [(1, "OFF"), (4, "OFF"), (16, "OFF"), (64, "OFF"), (1, "K3"), (4, "K3")]
    jobs = {f"{batch} {spec}": slices.format(batch=batch, spec=spec) for batch, spec in sizes}
    jobs |= {f"tiny {kind}": tiny.format(kind=kind) for kind in TINY_KINDS}
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", head + text],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, text in jobs.items()
    }
    for name, process in processes.items():
        output = process.communicate()[0]
        emit(row="warm", name=f"warm {name}", rc=process.returncode, tail=output[-1500:])


def stage_q8(emit: Emit) -> None:
    """8 layers, the issue's four sizes."""
    plain_rows(emit, 8, (1, 4, 16, 64), 3, "8 layers")


def stage_q8fused(emit: Emit) -> None:
    """The same with the fused kernels for every dense weight."""
    plain_rows(emit, 8, (1, 4, 16), 2, "8 layers, fused", environment={"AUTOTUNE_LINEAR": "fused"})


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
        for batch in (1, 4):
            row = measure(engine, batch, OFF, 3)
            if row["distinct_experts"] is not None:
                row["floor_ms"] = floor_ms(48, batch, row["distinct_experts"])
            emit(row="decode", name=name, layers=48, **row)
        for batch in (1, 4):
            row = measure(engine, batch, K3, 4 if batch == 1 else 2)
            emit(row="eagle3 k=3", name=name, layers=48, **row)
        verifies = [
            engine.generate(requests(1, 130, seed), K3, concurrency=1).segments_ms.get("verify")
            for seed in range(5)
        ]
        emit(row="verify spread", name=f"{name}, verify of 4 captured", verify_ms=verifies)


def stage_q48eager(emit: Emit) -> None:
    """The same verify with its graph off."""
    graphs = GRAPHS | {"verify": False}
    with Engine(config(48, 1, draft={"weights": "random"}, cuda_graph=graphs)) as engine:
        row = measure(engine, 1, K3, 2)
        emit(row="eagle3 k=3", name="48 layers, verify eager", layers=48, **row)


def stage_tp2(emit: Emit) -> None:
    """Two GPUs: over NVLink, and through host memory."""
    for name, environment in (
        ("8 layers, 2 GPUs, P2P off", {"NCCL_P2P_DISABLE": "1"}),
        ("8 layers, 2 GPUs, NVLink", {}),
    ):
        try:
            plain_rows(emit, 8, (1, 4, 16), 3, name, tp=2, environment=environment)
        except Exception as error:  # noqa: BLE001 - the other link is still worth measuring
            tail = getattr(error, "log_tail", "")
            emit(row="failure", name=name, error=f"{error}"[:500], log=tail[-3000:])


def stage_tp2spec(emit: Emit) -> None:
    """Two GPUs through host memory: the tiny model's outputs and an EAGLE-3 cycle of a slice."""
    environment = {"NCCL_P2P_DISABLE": "1"}
    draft = {"weights": "random"}
    with Engine(config(8, 4, tp=2, environment=environment, draft=draft)) as engine:
        row = measure(engine, 1, K3, 3)
        emit(row="eagle3 k=3", name="8 layers, 2 GPUs, P2P off", layers=8, **row)
    tiny_rows(emit, "tiny, 2 GPUs, P2P off", {"tp": 2, "environment": environment})


def stage_peer8(emit: Emit) -> None:
    """transformers on the same slice, eager and captured."""
    from bench.transformers_peer import peer_rows

    peer_rows(emit, 8, (1, 4, 16, 64))


STAGES: dict[str, tuple[Callable[[Emit], None], float]] = {
    # name -> (stage, timeout in seconds)
    "warm": (stage_warm, 100),
    "q8": (stage_q8, 90),
    "q48": (stage_q48, 110),
    "fp32": (stage_fp32, 90),
    "tiny": (stage_tiny, 90),
    "diagnose": (stage_diagnose, 60),
    "q48eager": (stage_q48eager, 60),
    "peer8": (stage_peer8, 80),
    "q8fused": (stage_q8fused, 60),
    "q8pdl": (stage_q8pdl, 60),
    "q48pdl": (stage_q48pdl, 80),
    "tp2": (stage_tp2, 120),
    "tp2spec": (stage_tp2spec, 120),
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
        "batch", "wall_ms", "wall_low_ms", "wall_high_ms", "late_wall_ms", "cycle_ms", "busy_ms",
        "floor_ms",
        "distinct_experts", "accept_length", "tokens_per_s", "speedup", "same_outputs", "start_s",
        "prefill_s", "verify_ms", "rc", "error", "eager_ms", "captured_ms",
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
    print(" ".join(parts), flush=True)
