"""Configurations of the dense and attention kernels side by side on this GPU.

    python bench/dense_variants.py --json OUT [--groups whole shard draft] [--cases norm_linear]

Shapes of Qwen3-30B-A3B in bf16: the whole model, one rank of two, the EAGLE-3 head. "table" is what
the op runs with unless told otherwise, "default" what it would without the shipped table. Every
variant is compared with the reference, captured in a CUDA graph over rotated weights (cold L2) and
replayed in turn with the others of its shape. With --forward the best of each op then run in whole
forwards of 8 layers, beside the table's. One JSON line a variant, as it is made; no configuration
is written.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.dense_choices import CASES, Choice
from kernels import tuning
from kernels.catalog import QWEN3_30B_A3B, Case
from kernels.forward import Forward, build_forward
from kernels.launch import programmatic_launch
from kernels.opset import opset
from kernels.timing import relative_error, rotated_inputs

DEVICE = torch.device("cuda")
BANDWIDTH = 4.2e12
MAX_ERROR = 0.03
ROUNDS = 9
#: forwards with the best of all, by which kernels may start early
EARLY = {
    "early route": frozenset({"linear_route"}),
    "early qkv": frozenset({"norm_linear"}),
    "early dense": frozenset({"norm_linear", "linear_route"}),
    "early dense and attention": frozenset({"norm_linear", "linear_route", "other"}),
}


def run_once(choice: Choice, config: tuning.Config, small: bool) -> float:
    """Run one variant of a case on fresh inputs; its relative error."""
    case = choice.case(small)
    with _forced(choice, config):
        return relative_error(case, case.make(DEVICE, torch.bfloat16))


def _forced(choice: Choice, config: tuning.Config) -> ExitStack:
    stack = ExitStack()
    if config:
        stack.enter_context(tuning.forced(choice.op, config))
    return stack


def _warm(jobs: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """In a worker: run each variant once, which compiles it; those that ran."""
    ready = []
    for number, name in jobs:
        try:
            run_once(CASES[number], CASES[number].configs[name], True)
            torch.cuda.synchronize()
            ready.append((number, name))
        except Exception as error:  # noqa: BLE001 - reported; the others go on
            text = str(error)[:200].replace("\n", " ")
            print(f"cannot run {CASES[number].name} {name}: {text}", file=sys.stderr, flush=True)
    return ready


def compile_all(numbers: list[int], workers: int, seconds: float) -> set[tuple[int, str]]:
    """Compile in parallel, the cases in order; which (case, variant) are ready."""
    jobs = [(number, name) for number in numbers for name in CASES[number].configs]
    parts = [jobs[i : i + 2] for i in range(0, len(jobs), 2)]
    ready: set[tuple[int, str]] = set()
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    futures = [pool.submit(_warm, part) for part in parts]
    try:
        for future in as_completed(futures, timeout=seconds):
            if future.exception() is None:
                ready.update(future.result())
    except TimeoutError:
        print(f"compiling stopped after {seconds:.0f} s", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list((pool._processes or {}).values()):
        process.kill()
    return ready


def _graph(case: Case, choice: Choice, config: tuning.Config, inputs: list[Any]) -> Any:
    graph = torch.cuda.CUDAGraph()
    with _forced(choice, config), torch.cuda.graph(graph):
        for each in inputs:
            case.run(opset("triton"), each)
    return graph


def bench_case(choice: Choice, names: list[str]) -> list[dict[str, Any]]:
    """Check, capture and time the variants of one case; the fastest first."""
    case = choice.case(False)
    inputs = rotated_inputs(case, DEVICE, torch.bfloat16)
    todo = inputs * max(1, -(-16 // len(inputs)))
    rows: list[dict[str, Any]] = []
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    errors: dict[str, float] = {}
    used: dict[str, Any] = {}
    for name in names:
        config = choice.configs[name]
        try:
            with _forced(choice, config):
                errors[name] = relative_error(case, inputs[0])
            key, chosen, _ = tuning.last_used(choice.op)
            used[name] = {"key": key, "config": dict(chosen)}
            graphs[name] = _graph(case, choice, config, todo)
        except Exception as error:  # noqa: BLE001 - one variant must not end the others
            rows.append({"name": name, "config": config, "failure": str(error)[:300]})
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(ROUNDS + 1):
        for name, graph in graphs.items():
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number:
                times[name].append(start.elapsed_time(end) * 1000 / len(todo))
    floor = case.min_bytes(inputs[0]) / BANDWIDTH * 1e6
    for name, us in times.items():
        rows.append({"name": name, "us": median(us), "low_us": min(us), "high_us": max(us),
                     "error": errors[name], "floor_us": floor, **used[name]})  # fmt: skip
    return sorted(rows, key=lambda row: row.get("us", 0.0))


def _capture(
    forward: Forward, force: dict[str, tuning.Config], early: frozenset[str]
) -> torch.cuda.CUDAGraph:
    with ExitStack() as stack:
        stack.enter_context(programmatic_launch(early))
        for op, config in force.items():
            stack.enter_context(tuning.forced(op, config))
        for _ in range(2):
            forward.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward.run()
    return graph


def bench_forward(
    size: tuple[int, int], choices: dict[str, dict[str, tuning.Config]]
) -> list[dict[str, Any]]:
    """Whole forwards of 8 layers and the head under each set of forced configurations."""
    torch.manual_seed(0)
    forward = build_forward(QWEN3_30B_A3B, 8, size, 1024, DEVICE, torch.bfloat16)
    # as engine/policy.py has it
    forward.fused = size != (1, 1)
    always = frozenset() if forward.fused else frozenset({"linear_add", "norm_route", "other"})
    graphs, outputs = {}, {}
    for name, force in choices.items():
        try:
            graphs[name] = _capture(forward, force, always | EARLY.get(name, always))
            graphs[name].replay()
            outputs[name] = forward.hidden.float()
        except Exception as error:  # noqa: BLE001 - one variant must not end the others
            print(f"forward {name}: {str(error)[:200]}", flush=True)
    wanted = outputs["table"]
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            graph.replay()
            start.record()
            for _ in range(3):
                graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / 3)
    return [
        {"forward": f"{size[0]}x{size[1]}", "name": name, "us": median(us), "low_us": min(us),
         "high_us": max(us), "config": {op: dict(c) for op, c in choices[name].items()},
         # routing near-ties take another expert, so this is no pass or fail
         "moved": float((outputs[name] - wanted).abs().max() / wanted.abs().max())}
        for name, us in times.items()
    ]  # fmt: skip


def _forwards(size: tuple[int, int], best: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """The table, the two best of each op alone, and the best of all together."""
    found: dict[str, dict[str, tuning.Config]] = {"table": {}}
    every: dict[str, tuning.Config] = {}
    for number, rows in best.items():
        choice = CASES[number]
        if choice.group != "whole" or size not in choice.sizes:
            continue
        for row in rows[:2]:
            if row["name"] != "table":
                found[f"{choice.op} {row['name']}"] = {choice.op: row["config"]}
        every[choice.op] = rows[0]["config"]
    return found | dict.fromkeys(("best of all", *EARLY), every)


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--groups", nargs="+", default=["whole", "shard", "draft"])
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of the names of some")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--compile-s", type=float, default=32.0)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--forward", nargs="*", default=[], help="sizes, for example 1x4")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench/dense_variants.py needs a CUDA GPU", file=sys.stderr)
        return 2
    begin = time.monotonic()
    numbers = [
        i
        for i, choice in enumerate(CASES)
        if choice.group in args.groups and any(part in choice.name for part in args.cases)
    ]
    ready = compile_all(numbers, args.workers, args.compile_s)
    print(f"{len(ready)} compiled in {time.monotonic() - begin:.0f} s", flush=True)
    best: dict[int, list[dict[str, Any]]] = {}

    def note(row: dict[str, Any]) -> None:
        with args.json.open("a") as file:
            file.write(json.dumps(row) + "\n")

    for number in numbers:
        if time.monotonic() - begin > args.budget_s:
            print("out of time", flush=True)
            break
        choice = CASES[number]
        try:
            rows = bench_case(choice, [n for n in choice.configs if (number, n) in ready])
        except Exception as error:  # noqa: BLE001 - the other cases go on
            print(f"{choice.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        for row in rows:
            note({"case": choice.name, "op": choice.op} | row)
        good = [r for r in rows if "us" in r and r["error"] <= MAX_ERROR]
        bad = [r["name"] for r in rows if "us" not in r or r["error"] > MAX_ERROR]
        if good:
            shown = ", ".join(f"{r['name']} {r['us']:.2f}" for r in good)
            print(f"{choice.name} (floor {good[0]['floor_us']:.1f}): {shown}", flush=True)
            best[number] = good
        if bad:
            print(f"  wrong or failed: {', '.join(bad)}", flush=True)
        torch.cuda.empty_cache()
        # forwards come as soon as their ops are known
        for text in list(args.forward):
            size = (int(text.split("x")[0]), int(text.split("x")[1]))
            wanted = [i for i in numbers if CASES[i].group == "whole" and size in CASES[i].sizes]
            if all(i in best for i in wanted) and time.monotonic() - begin < args.budget_s:
                args.forward.remove(text)
                for row in bench_forward(size, _forwards(size, best)):
                    note(row)
                    print(f"forward {text} {row['name']}: {row['us']:.1f}", flush=True)
                torch.cuda.empty_cache()
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
