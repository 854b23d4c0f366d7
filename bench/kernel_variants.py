"""Whole captured forwards with and without prefetching, compared in one interleaved run.

    python bench/kernel_variants.py --out DIR [--tokens 1x1 1x4 16x1 1x64] [--variants A B ...]

Shapes of Qwen3-30B-A3B, bf16, context 1024, 8 layers and the head (their weights are many times any
L2). A variant is what ops bring into L2, how, and which kernels may start early. Each is checked
against the forward without any (same weights: the hidden state and the tokens), then all are
replayed in turn, ``--rounds`` times. One process a size, restarted without the variant that failed;
rows go to DIR/variants.jsonl as they are made, the table is printed last.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels import tune
from kernels.catalog import QWEN3_30B_A3B
from kernels.forward import Forward, build_forward
from kernels.launch import programmatic_launch
from kernels.prefetch import prefetching

DEVICE = torch.device("cuda")
#: the small kernels around the router, and what follows them
SMALL = frozenset({"linear_add", "norm_route"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the same forward."""

    ahead: dict[str, str] = field(default_factory=dict)
    choice: str = "keep"
    pdl: bool | frozenset[str] = False
    fused: bool = False


#: op -> what it brings; "next" is the next layer's QKV projection
ROUTE, MOE = {"norm_route": "next"}, {"norm_moe_add": "next"}
OUT, ROUTER = {"norm_linear": "out"}, {"linear_add": "router"}
VARIANTS = {
    "plain": Variant(),
    "fused": Variant(fused=True),
    "fused+moe": Variant(ahead=MOE, fused=True),
    "fused+out+moe": Variant(ahead=OUT | MOE, fused=True),
    "fused+out+next": Variant(ahead=OUT | {"linear_route": "next"}, fused=True),
    "fused+attn:out+moe": Variant(ahead={"qkv_attention": "out"} | MOE, fused=True),
    "fused+pdl": Variant(pdl=True, fused=True),
    "fused+pdl:route": Variant(pdl=frozenset({"linear_route", "other"}), fused=True),
    "fused+pdl+moe": Variant(ahead=MOE, pdl=True, fused=True),
    "out-by-qkv": Variant(ahead=OUT),
    "router": Variant(ahead=ROUTER),
    "next-by-moe": Variant(ahead=MOE, choice="normal"),
    "next-by-moe-kept": Variant(ahead=MOE),
    "next-by-route": Variant(ahead=ROUTE),
    "next-by-route-normal": Variant(ahead=ROUTE, choice="normal"),
    "out+router+moe": Variant(ahead=OUT | ROUTER | MOE),
    "out+router+route": Variant(ahead=OUT | ROUTER | ROUTE),
    "out+router+route+moe": Variant(ahead=OUT | ROUTER | ROUTE | MOE),
    "attn:out": Variant(ahead={"qkv_attention": "out"}),
    "attn:out+router+moe": Variant(ahead={"qkv_attention": "out"} | ROUTER | MOE),
    "attn:out+router+route": Variant(ahead={"qkv_attention": "out"} | ROUTER | ROUTE),
    "pdl:all": Variant(pdl=True),
    "pdl:linear_add": Variant(pdl=frozenset({"linear_add", "other"})),
    "pdl:small": Variant(pdl=SMALL | {"other"}),
    "pdl:small+gate_up": Variant(pdl=SMALL | {"other", "moe_gate_up"}),
    "pdl:moe_down": Variant(pdl=frozenset({"moe_gate_up", "moe_down"})),
    "pdl:dense": Variant(pdl=frozenset({"norm_linear", "other", "linear_add", "norm_route"})),
    "pdl:dense+next-by-moe": Variant(
        ahead=MOE, pdl=frozenset({"norm_linear", "other", "linear_add", "norm_route"})
    ),
    "pdl:all+router+route": Variant(ahead=ROUTER | ROUTE, pdl=True),
}

#: variants whose kernels are listed one by one
PROFILED = ("plain", "out+router+route+moe", "pdl:all", "fused", "fused+out+moe")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _profile(graph: torch.cuda.CUDAGraph) -> list[dict[str, object]]:
    """Each kernel's median duration and the median gap before it, us, in one replay."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch._C._autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    spans = spans[len(spans) // 2 :]
    found: dict[str, list[tuple[float, float]]] = {}
    for (_, earlier, _), (start, end, name) in pairwise(spans):
        found.setdefault(name, []).append((end - start, start - earlier))
    return [
        {"kernel": name, "calls": len(values), "us": median(v[0] for v in values),
         "gap_us": median(v[1] for v in values)}
        for name, values in found.items()
    ]  # fmt: skip


def _capture(forward: Forward, variant: Variant) -> torch.cuda.CUDAGraph:
    forward.prefetch, forward.fused = variant.ahead, variant.fused
    with programmatic_launch(variant.pdl), prefetching(variant.choice):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward.run()
    return graph


def _error(forward: Forward, hidden: torch.Tensor, token: torch.Tensor) -> dict[str, float]:
    wide = hidden.float()
    deviation = (forward.hidden.float() - wide).abs().max() / wide.abs().max()
    return {
        "error": float(deviation.nan_to_num(float("inf"), float("inf"))),
        "tokens_differ": float((forward.token != token).float().mean()),
    }


def worker(size_text: str, names: list[str], rounds: int, layers: int, out: Path) -> None:
    """Build once, capture every variant, check, time in turn; appends rows to ``out``."""
    size = tune.parse_size(size_text)
    torch.manual_seed(0)
    forward = build_forward(QWEN3_30B_A3B, layers, size, 1024, DEVICE, torch.bfloat16)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    checks: dict[str, dict[str, float]] = {}
    hidden = token = torch.empty(0)

    def note(row: dict[str, object]) -> None:
        with out.open("a") as file:
            file.write(json.dumps({"size": size_text, "layers": layers} | row) + "\n")

    for name in names:
        note({"variant": name, "state": "started"})
        start = time.monotonic()
        try:
            graph = _capture(forward, VARIANTS[name])
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            note({"variant": name, "state": "failed", "failure": repr(error)[:400]})
            if "illegal" in repr(error) or "CUDA error" in repr(error):
                raise SystemExit(3) from error
            continue
        if name == "plain":
            hidden, token = forward.hidden.clone(), forward.token.clone()
        checks[name] = _error(forward, hidden, token)
        graphs[name] = graph
        print(f"{size_text} {name} ready in {time.monotonic() - start:.1f} s", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            first, last = (_event() for _ in range(2))
            # the first replay brings the clocks and the caches to this variant's state
            graph.replay()
            first.record()
            for _ in range(3):
                graph.replay()
            last.record()
            torch.cuda.synchronize()
            times[name].append(first.elapsed_time(last) * 1000 / 3)
    for name, values in times.items():
        note({"variant": name, "state": "timed", "us": median(values), "low_us": min(values),
              "high_us": max(values), **checks[name]})  # fmt: skip
    for name in PROFILED:
        if name in graphs:
            try:
                note({"variant": name, "state": "profile", "kernels": _profile(graphs[name])})
            except Exception as error:  # noqa: BLE001 - timings do not hang on a profiler
                note({"variant": name, "state": "no profile", "failure": repr(error)[:300]})


def compile_kernels(size_text: str, names: list[str]) -> None:
    """Run each variant once with one layer: Triton's disk cache then has its kernels."""
    forward = build_forward(
        QWEN3_30B_A3B, 1, tune.parse_size(size_text), 1024, DEVICE, torch.bfloat16
    )
    for name in names:
        variant = VARIANTS[name]
        forward.prefetch, forward.fused = variant.ahead, variant.fused
        try:
            with programmatic_launch(variant.pdl), prefetching(variant.choice):
                forward.run()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - reported when it is timed
            print(f"compiling {size_text} {name}: {repr(error)[:300]}", file=sys.stderr)
            return


def _compile_all(args: argparse.Namespace, names: list[str]) -> None:
    """Every size in ``--workers`` / sizes processes at once."""
    each = max(1, args.workers // len(args.tokens))
    command = [sys.executable, __file__, "--out", str(args.out), "--compile"]
    running = [
        subprocess.Popen([*command, size, "--variants", *names[part::each]])
        for size in args.tokens
        for part in range(each)
        if names[part::each]
    ]
    end = time.monotonic() + args.limit_s
    for process in running:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def _rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _run_size(size: str, names: list[str], args: argparse.Namespace, out: Path) -> None:
    """Worker processes until every variant has been tried, without one that kills its process."""
    left = list(names)
    for _ in range(3):
        command = [sys.executable, __file__, "--worker", size, "--out", str(args.out)]
        command += ["--rounds", str(args.rounds), "--layers", str(args.layers)]
        try:
            done = subprocess.run(
                [*command, "--variants", *left], timeout=args.limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            done = None
        rows = [row for row in _rows(out) if row["size"] == size]
        if any(row["state"] == "timed" for row in rows) or (done and done.returncode == 0):
            return
        started = [str(row["variant"]) for row in rows if row["state"] == "started"]
        if not started or started[-1] == "plain":
            return
        left = [name for name in left if name != started[-1]]


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", nargs="+", default=["1x4", "1x1", "16x1", "1x64"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=90.0, help="seconds a process")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    out = args.out / "variants.jsonl"
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        print(f"unknown variants {unknown}; known: {', '.join(VARIANTS)}", file=sys.stderr)
        return 2
    if args.compile:
        compile_kernels(args.compile, args.variants)
        return 0
    if args.worker:
        worker(args.worker, args.variants, args.rounds, args.layers, out)
        return 0
    names = ["plain", *(name for name in args.variants if name != "plain")]
    start = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    _compile_all(args, names)
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    for size in args.tokens:
        _run_size(size, names, args, out)
    timed = {(r["size"], r["variant"]): r for r in _rows(out) if r["state"] == "timed"}
    print(f"{'variant':<26}" + "".join(f"{size:>20}" for size in args.tokens))
    for name in names:
        cells = ""
        for size in args.tokens:
            row, base = timed.get((size, name)), timed.get((size, "plain"))
            text = "-"
            if row and base:
                wrong = "!" if float(row["error"]) > 0.02 else ""  # type: ignore[arg-type]
                text = f"{row['us']:.0f} ({row['us'] - base['us']:+.0f}){wrong}"  # type: ignore[operator]
            cells += f"{text:>20}"
        print(f"{name:<26}{cells}")
    for row in _rows(out):
        if row["state"] == "failed":
            print(f"failed: {row['size']} {row['variant']}: {row['failure']}")
    print(f"{time.monotonic() - start:.0f} s on {os.uname().nodename}; rows in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
