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
GRAPHS = {"decode": True, "draft": True, "verify": True, "extend": True}
TINY = Path(__file__).resolve().parent.parent / "studies" / "models"
OFF = SpeculationConfig()
K3 = SpeculationConfig(method="eagle3", steps=3, topk=1, synthetic_acceptance=(1.0, 1.0, 0.0))

TINY_KINDS = {
    "off": OFF,
    "chain 3": SpeculationConfig(method="eagle3", steps=3, topk=1),
    "chain 5": SpeculationConfig(method="eagle3", steps=5, topk=1),
    "tree 3x2/8": SpeculationConfig(method="eagle3", steps=3, topk=2, draft_tokens=8),
    "tree 3x4/16": SpeculationConfig(method="eagle3", steps=3, topk=4, draft_tokens=16),
}

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
        "from engine.api import Engine\n"
    )
    slices = (
        "with Engine(s.config(4, 64, draft={{'weights': 'random'}})) as e:\n"
        "    e.generate(s.requests({batch}, 6, 1), s.{spec}, concurrency={batch})\n"
    )
    tiny = (
        "asks = s.tiny_requests(16, 128, 40)\n"
        "with Engine(s.tiny_config()) as e:\n"
        "    for n in (1, 4, 16): e.generate(asks[:n], s.TINY_KINDS[{kind!r}], concurrency=n)\n"
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

    A kind that kills the workers is left out of the rest, and said.
    """
    kinds = dict(TINY_KINDS)
    asks = tiny_requests(32, 128, 192)
    engine = Engine(tiny_config(**changes))
    try:
        for concurrency in (1, 4, 16):
            some = asks[: max(4, 2 * concurrency)]
            runs: dict[str, list[RunResult]] = {kind: [] for kind in kinds}
            for repeat in range(4):
                for kind in list(kinds):
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
                        engine = Engine(tiny_config(**changes))
                        continue
                    if repeat:
                        runs[kind].append(run)
            tiny_level(emit, name, concurrency, {k: runs[k] for k in kinds})
    finally:
        engine.close()


def tiny_level(emit: Emit, name: str, concurrency: int, runs: dict[str, list[RunResult]]) -> None:
    """Rows of one load: medians, and speed-ups over plain decoding."""
    base = statistics.median(r.tokens_per_s or 0.0 for r in runs["off"])
    plain = [r.token_ids for r in runs["off"][-1].requests]
    for kind, found in runs.items():
        run, rates = found[-1], [r.tokens_per_s or 0.0 for r in found]
        same = sum(r.token_ids == p for r, p in zip(run.requests, plain, strict=True))
        emit(
            row="tiny",
            name=f"{name}, {kind}",
            batch=concurrency,
            tokens_per_s=statistics.median(rates),
            low=min(rates),
            high=max(rates),
            speedup=statistics.median(rates) / base,
            accept_length=run.counters.accept_length,
            same_outputs=f"{same}/{len(plain)}",
            cycle_ms=run.cycle_ms,
            busy_ms=sum(m for n, m in run.segments_ms.items() if n != "host_gap"),
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
