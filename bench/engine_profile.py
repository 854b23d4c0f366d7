"""Where a step's time goes on host and device: the engine's loop in this process, profiled.

``profile_rows`` runs the same code as a worker does, without the process between: the wall of
prefills and of decodes by themselves, host functions by their own time (cProfile), and kernels by
their time a step with the gaps between them (torch's profiler). A profiled run is slower; its walls
are not compared with anything.
"""

import cProfile
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from bench.engine_rows import OFF, config, requests
from engine.build import build, resident, resolve
from engine.collectives import LocalGroup
from engine.config import SpeculationConfig
from engine.runner import Runner

Emit = Callable[..., None]
_TOP = 28


def runner_here(layers: int, batch: int, **changes: Any) -> Runner:
    """The engine's rank 0 without a worker process around it."""
    launch = config(layers, batch, **changes)
    shapes, device = resolve(launch), torch.device("cuda", 0)
    executor, head = build(launch, shapes, LocalGroup(), device)
    executor.resident = resident(executor, head, launch)
    return Runner(executor, head, slots=batch, eos_ids=())


@torch.inference_mode()
def profile_rows(
    emit: Emit, layers: int, batch: int, speculation: SpeculationConfig, name: str
) -> None:
    """Rows "walls", "host" and "kernels" of one configuration."""
    changes = {} if speculation.method == "off" else {"draft": {"weights": "random"}}
    runner = runner_here(layers, batch, **changes)

    def wall(new: int) -> tuple[float, Any]:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        run = runner.run(requests(batch, new, 1), speculation, concurrency=batch)
        return time.perf_counter() - start_s, run

    for new in (257, 1):
        wall(new)
    longs, shorts, decodes = [], [], []
    for _ in range(6):
        long_s, run = wall(257)
        longs.append(long_s * 1e3)
        decodes.append(run.decode_wall_s * 1e3)
        shorts.append(wall(1)[0] * 1e3)
    emit(
        row="walls",
        name=name,
        batch=batch,
        prefill_ms=[round(t, 2) for t in shorts],
        long_ms=[round(t, 2) for t in longs],
        decode_ms=[round(t, 2) for t in decodes],
        outside_decode_ms=[round(a - b, 2) for a, b in zip(longs, decodes, strict=True)],
        cycles=run.num_cycles,
        wall_ms=(statistics.median(longs) - statistics.median(shorts)) / run.num_cycles,
        distinct_experts=run.distinct_experts,
        segments_ms=dict(run.segments_ms),
    )
    for new in (129, 1):
        emit(row="host", name=name, batch=batch, new=new, lines=_host_lines(lambda n=new: wall(n)))
    for new in (33, 1):
        emit(row="kernels", name=name, batch=batch, new=new, **_kernels(lambda n=new: wall(n)))


def _host_lines(call: Callable[[], object]) -> list[str]:
    profiler = cProfile.Profile()
    profiler.enable()
    call()
    profiler.disable()
    found: Any = pstats.Stats(profiler)
    rows = sorted(found.stats.items(), key=lambda item: -item[1][2])[:_TOP]
    return [
        f"{own * 1e3:9.2f} ms own {cumulative * 1e3:9.2f} ms {calls:7d} x "
        f"{path.rpartition('/')[2]}:{line} {function}"
        for (path, line, function), (_, calls, own, cumulative, _) in rows
    ]


def _kernels(call: Callable[[], tuple[float, Any]]) -> dict[str, Any]:
    """Device time by kernel, per cycle where there are cycles."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        _, run = call()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if "CUDA" in str(e.device_type) and e.device_time > 0]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    per = max(run.num_cycles, 1)
    times: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    busy = last = 0.0
    for start, end, name in spans:
        times[name] += end - start
        counts[name] += 1
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    top = sorted(times, key=lambda n: -times[n])[:_TOP]
    return {
        "cycles": run.num_cycles,
        "busy_us": busy / per,
        "span_us": (spans[-1][1] - spans[0][0]) / per if spans else None,
        "num_kernels": len(spans) / per,
        "lines": [f"{times[n] / per:9.2f} us {counts[n] / per:8.2f} x {n[:100]}" for n in top],
    }


def stage_profile(emit: Emit) -> None:
    """8 layers at 1 and 16 (plain), and the EAGLE-3 cycle of the slice."""
    from bench.engine_rows import K3

    for batch in (1, 16):
        profile_rows(emit, 8, batch, OFF, f"8 layers, {batch}")
        torch.cuda.empty_cache()
    profile_rows(emit, 8, 1, K3, "8 layers, k=3")
