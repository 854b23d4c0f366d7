"""Configurations of the attention kernel side by side on this GPU.

    python bench/attention_variants.py --json OUT [--sizes 1x1 1x4] [--contexts 1024 8192]

Shapes of Qwen3-30B-A3B, bf16; "table" is what the op runs with unless told otherwise. Every variant
is checked against the reference, captured in a CUDA graph over rotated caches (cold L2) and
replayed in turn with the others, so that all see the same clocks. Compiling happens in workers and
timing in a child: one that dies or stands still costs that variant, not the run. One JSON line per
variant goes to --json. Unlike ``kernels.tune`` it writes no configuration.
"""

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels import tuning
from kernels.catalog import QWEN3_30B_A3B, Case, Inputs, attention_case
from kernels.launch import pow2
from kernels.opset import opset
from kernels.timing import rotated_inputs
from kernels.tune import parse_size

BANDWIDTH = 4.2e12
DEVICE = torch.device("cuda")
SIZES = ("1x1", "1x4", "16x1", "1x64", "64x1", "4x4", "16x4", "4x1")
#: seconds without a word after which the timing child is replaced
STILL_S = 10.0

Variant = dict[str, int]
Job = tuple[int, tuple[tuple[int, int], str, Variant]]
Task = tuple[int, str, list[str]]

_FIELDS = ("block_l", "splits", "fold", "wait", "ahead", "stages", "num_warps")
Choices = tuple[tuple[int, ...], ...]
#: by kind of size; the rows of a block come from the size
_FEW: Choices = (
    (64, 16, 0, 1, 1, 2, 4), (64, 16, 0, 1, 2, 3, 4), (64, 20, 0, 1, 1, 2, 4),
    (64, 20, 0, 1, 2, 3, 4), (64, 20, 0, 1, 2, 2, 4), (64, 6, 0, 0, 1, 3, 4),
)  # fmt: skip
_MANY: Choices = (
    (64, 2, 1, 0, 6, 4, 4), (64, 4, 0, 0, 1, 3, 4), (64, 4, 0, 1, 2, 3, 4),
    (128, 2, 1, 0, 3, 3, 8), (64, 3, 0, 0, 1, 3, 4), (64, 1, 1, 0, 4, 4, 4),
)  # fmt: skip
_FULL: Choices = (
    (64, 1, 1, 0, 4, 4, 4), (64, 1, 1, 0, 2, 3, 4), (128, 1, 1, 0, 3, 3, 8),
)  # fmt: skip
_LONG: Choices = (
    (64, 4, 0, 0, 2, 3, 4), (64, 4, 0, 1, 2, 3, 4), (64, 2, 0, 0, 1, 3, 4),
    (64, 3, 0, 0, 1, 3, 4), (128, 2, 0, 0, 1, 2, 4),
)  # fmt: skip


def variants(size: tuple[int, int]) -> dict[str, Variant]:
    """Name -> configuration (empty: the table's)."""
    sequences, tokens = size
    rows = tokens * QWEN3_30B_A3B.heads // QWEN3_30B_A3B.kv_heads
    groups = sequences * QWEN3_30B_A3B.kv_heads
    if rows >= 64:
        blocks, choices = [64], _LONG
    elif groups >= 128:
        blocks, choices = [16], _FULL
    else:
        blocks = [32, 16] if sequences == 1 and rows > 16 else [min(64, pow2(rows, 16))]
        choices = _FEW if sequences <= 4 else _MANY
    found: dict[str, Variant] = {"table": {}}
    for block_r in blocks:
        for values in choices:
            config = {"block_r": block_r} | dict(zip(_FIELDS, values, strict=True))
            found[f"r{block_r}." + ".".join(map(str, values))] = config
    return found


def call_of(case: Case, config: Variant, inputs: Inputs) -> Callable[[], Any]:
    """What one call of the variant is."""
    if not config:
        return lambda: case.run(opset("triton"), inputs)

    def run() -> Any:
        with tuning.forced("qkv_attention", config):
            return case.run(opset("triton"), inputs)

    return run


def _warm(jobs: list[Job]) -> None:
    """In a worker: run each once, which compiles it into Triton's disk cache; one line each."""
    for number, (size, name, config) in jobs:
        try:
            case = attention_case(QWEN3_30B_A3B, *size, 1024)
            call_of(case, config, case.make(DEVICE, torch.bfloat16))()
            torch.cuda.synchronize()
            print("ready", number, flush=True)
        except Exception as error:  # noqa: BLE001 - reported; the others go on
            text = str(error)[:300].replace("\n", " ")
            print("bad", number, size, name, type(error).__name__, text, flush=True)


def _supervise(jobs: list[Job], end: float, ready: set[int]) -> None:
    """Keep one worker going; the job at which it dies is passed over."""
    while jobs and time.monotonic() < end:
        command = [sys.executable, __file__, "--json", "-", "--warm", json.dumps(jobs)]
        worker = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        timer = threading.Timer(max(0.0, end - time.monotonic()), worker.kill)
        timer.start()
        done = 0
        for line in worker.stdout or ():
            word, number, *rest = line.split(maxsplit=2)
            done += 1
            if word == "ready":
                ready.add(int(number))
            else:
                print("cannot run:", *rest, flush=True)
        worker.wait()
        timer.cancel()
        if done < len(jobs) and time.monotonic() < end:
            print(f"a worker died ({worker.returncode}) at {jobs[done]}", flush=True)
        jobs = jobs[done + 1 :]


def compile_all(sizes: list[tuple[int, int]], workers: int, seconds: float) -> set[Any]:
    """Compile in parallel; which (size, variant name) are ready."""
    jobs = [
        (size, name, config)
        for size in sizes
        for name, config in variants(size).items()
    ]  # fmt: skip
    numbered = list(enumerate(jobs))
    ready: set[int] = set()
    end = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_supervise, args=(numbered[n::workers], end, ready))
        for n in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {(jobs[number][0], jobs[number][1]) for number in ready}


def error_of(
    wanted: torch.Tensor, caches: list[torch.Tensor], call: Callable[[], Any], inputs: Inputs
) -> float:
    """Largest deviation of output and caches over the largest reference value."""
    got = call()
    worst = 0.0
    for a, b in ((got, wanted), (inputs["k_cache"], caches[0]), (inputs["v_cache"], caches[1])):
        off = (a.float() - b.float()).abs().max() / b.float().abs().max()
        worst = max(worst, float(off.nan_to_num(float("inf"), float("inf"))))
    return worst


def bench_size(
    size: tuple[int, int], context: int, names: dict[str, Variant], rounds: int
) -> list[dict[str, Any]]:
    """Check, capture and time every variant of one size; the fastest first."""
    case = attention_case(QWEN3_30B_A3B, *size, context)
    rotated = rotated_inputs(case, DEVICE, torch.bfloat16)
    first = rotated[0]
    tail = [first["k_cache"][:, context:].clone(), first["v_cache"][:, context:].clone()]
    wanted = case.run(opset("reference"), first)
    caches = [first["k_cache"].clone(), first["v_cache"].clone()]
    floor = case.min_bytes(first) / BANDWIDTH * 1e6
    rows: list[dict[str, Any]] = []
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, float, int]] = {}
    for name, config in names.items():
        print(f"@{name}", flush=True)
        try:
            error = 0.0
            for _ in range(2):
                first["k_cache"][:, context:] = tail[0]
                first["v_cache"][:, context:] = tail[1]
                call = call_of(case, config, first)
                error = max(error, error_of(wanted, caches, call, first))
            calls = [call_of(case, config, inputs) for inputs in rotated]
            while len(calls) < 16:
                calls += calls
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
            graphs[name] = graph, error, len(calls)
        except Exception as failure:  # noqa: BLE001 - one variant must not end the others
            rows.append({"name": name, "config": config, "failure": str(failure)[:300]})
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(rounds + 1):
        for name, (graph, _, count) in graphs.items():
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number:
                times[name].append(start.elapsed_time(end) * 1000 / count)
    for name, (_, error, _) in graphs.items():
        us = times[name]
        rows.append({"name": name, "us": median(us), "low_us": min(us), "high_us": max(us),
                     "error": error, "floor_us": floor, "config": names[name]})  # fmt: skip
    return sorted(rows, key=lambda row: row.get("us", 0.0))


def measure(path: Path, tasks: list[Task], rounds: int) -> None:
    """In the child: every (context, size, names) in turn; progress to stdout, rows to ``path``."""
    for context, text, names in tasks:
        size = parse_size(text)
        table = variants(size)
        try:
            rows = bench_size(size, context, {n: table[n] for n in names}, rounds)
        except Exception as error:  # noqa: BLE001 - the other sizes go on
            print(f"{text} at {context}: {type(error).__name__}: {error}"[:500], flush=True)
            rows = []
        with path.open("a") as file:
            for row in rows:
                file.write(json.dumps({"size": text, "context": context} | row) + "\n")
        good = [r for r in rows if "us" in r]
        if good:
            shown = (f"{r['name']} {r['us']:.1f}{'' if r['error'] < 0.03 else '!'}" for r in good)
            floor = good[0]["floor_us"]
            print(f"{text} at {context}, floor {floor:.1f}: " + ", ".join(shown), flush=True)
        for r in rows:
            if "failure" in r:
                print(f"  failed {r['name']}: {r['failure'][:150]}", flush=True)
        torch.cuda.empty_cache()
        print(f"@done {context} {text}", flush=True)


def supervise_measuring(path: Path, tasks: list[Task], rounds: int, end: float) -> None:
    """Run ``measure`` in a child; one that stands still is replaced without what it stood at."""
    while tasks and time.monotonic() < end:
        command = [
            sys.executable, __file__, "--json", str(path), "--rounds", str(rounds), "--measure",
            json.dumps(tasks),
        ]  # fmt: skip
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(
            target=lambda source=child.stdout, sink=lines: [sink.put(x) for x in source],
            daemon=True,
        )
        reader.start()
        at, patience = "", 2 * STILL_S
        while tasks:
            try:
                line = lines.get(timeout=max(0.1, min(patience, end - time.monotonic())))
            except queue.Empty:
                if child.poll() is None:
                    print(f"stood still at {at}", flush=True)
                break
            patience = STILL_S
            if line.startswith("@done"):
                tasks = tasks[1:]
            elif line.startswith("@"):
                at = line[1:].strip()
            else:
                print(line, end="", flush=True)
        child.kill()
        child.wait()
        if tasks:
            context, text, names = tasks[0]
            left = [name for name in names if name != at]
            # one that neither ends nor names a variant is not tried again
            again = [(context, text, left)] if len(left) < len(names) else []
            tasks = again + tasks[1:]


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--compile-s", type=float, default=40.0)
    parser.add_argument("--budget-s", type=float, default=88.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench/attention_variants.py needs a CUDA GPU", file=sys.stderr)
        return 2
    if args.warm:
        _warm(json.loads(args.warm))
        return 0
    if args.measure:
        measure(args.json, json.loads(args.measure), args.rounds)
        return 0
    begin = time.monotonic()
    args.json.write_text("")
    try:
        sizes = [parse_size(text) for text in args.sizes]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    ready = compile_all(sizes, args.workers, args.compile_s)
    print(f"{len(ready)} compiled in {time.monotonic() - begin:.0f} s", flush=True)
    tasks = []
    for context in args.contexts:
        for size in sizes:
            names = [name for name in variants(size) if (size, name) in ready]
            tasks.append((context, f"{size[0]}x{size[1]}", names))
    supervise_measuring(args.json, tasks, args.rounds, begin + args.budget_s)
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
