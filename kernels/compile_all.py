"""Compile every kernel configuration for every supported GPU architecture, without a GPU.

    python -m kernels.compile_all [--fast] [--workers N] [--arch 90] [--json PATH] [--budget S]

One process a worker; each unit is compiled once an architecture. Prints the shared memory each
kernel needs and which configurations are excluded where, because they may exceed that GPU's shared
memory; exit code 1 when something does not compile or needs more than was estimated or is there.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kernels import (
    attention_kernel,
    linear,
    linear_route,
    moe_down,
    moe_gate_up,
    router,
    tuning,
)
from kernels.basic_cases import basic_cases
from kernels.catalog import (
    KIMI_K2,
    MIXTRAL_8X7B_TP8,
    QWEN3_30B_A3B,
    Case,
    Dims,
    layer_cases,
    shard,
)
from kernels.compile_unit import SHARED_LIMIT_BYTES, Unit, compile_unit, unit_of
from kernels.cycle_cases import cycle_cases, draft_cases, draw_case, exchange_case, rank_case
from kernels.launch import programmatic_launch, recording
from kernels.opset import opset

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Entry:
    """One configuration of one case: what is forced (op -> configuration; empty: the defaults)."""

    case: Case
    dtype: torch.dtype
    forced: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]

    @property
    def is_default(self) -> bool:
        """Whether this is what runs without tuning."""
        return not self.forced


def candidates_for(op: str, dims: Dims, num_sequences: int, num_tokens: int) -> list[tuning.Config]:
    """Every configuration tuning may try for ``op`` of ``layer_cases``."""
    rows = num_sequences * num_tokens
    q_width = dims.heads * dims.head_size
    if op == "norm_linear":
        width = q_width + 2 * dims.kv_heads * dims.head_size
        return linear.candidates(rows, width, dims.hidden)
    if op == "linear_add":
        return linear.candidates(rows, dims.hidden, q_width)
    if op == "linear_route":
        if rows > linear_route.MAX_TOKENS:
            return []
        return linear_route.candidates(rows, dims.hidden, q_width)
    if op == "lm_head":
        return linear.candidates(rows, dims.vocab, dims.hidden)
    if op == "norm_route":
        return router.candidates(rows, dims.experts)
    if op == "moe_gate_up":
        return moe_gate_up.candidates(rows, rows * dims.top_k, dims.hidden)
    if op == "moe_down":
        return moe_down.candidates(rows, rows * dims.top_k, dims.inter)
    if op in ("qkv_attention", "tree_attention"):
        return attention_kernel.candidates(
            num_sequences * dims.kv_heads, num_tokens * (dims.heads // dims.kv_heads)
        )
    raise ValueError(f"no candidates are known for op {op!r}")


def shipped_for(op: str, num_sequences: int, num_tokens: int) -> list[tuning.Config]:
    """What the shipped tables give ``op`` for as many rows, of whatever shape and GPU."""
    attention = op in ("qkv_attention", "tree_attention")
    wanted = (
        {"T": num_tokens, "B": num_sequences} if attention else {"T": num_sequences * num_tokens}
    )
    found = []
    for path in sorted(tuning.SHIPPED.glob("*.json")):
        for table in tuning.load(path).values():
            for key, config in table.get(op, {}).items():
                shape = dict(part.split("=", 1) for part in key.split(","))
                if all(shape.get(name) == str(size) for name, size in wanted.items()):
                    found.append(config)
    return found


def entries(fast: bool) -> Iterator[Entry]:
    """The defaults of every op (both models, both types), then the candidates of tuning."""
    sizes = ((1, 4), (1, 64)) if fast else ((1, 1), (1, 4), (16, 1), (1, 64), (2, 64))
    dims_list = (QWEN3_30B_A3B,) if fast else (QWEN3_30B_A3B, MIXTRAL_8X7B_TP8)
    for dims in dims_list:
        for num_sequences, num_tokens in sizes:
            for case in layer_cases(dims, num_sequences, num_tokens, 1024):
                yield Entry(case, torch.bfloat16, ())
    for case in basic_cases(QWEN3_30B_A3B, 1, 4, 1024):
        yield Entry(case, torch.bfloat16, ())
    yield Entry(draw_case(4, QWEN3_30B_A3B.vocab), torch.bfloat16, ())
    for num_rows in (1, 4):
        for case in draft_cases(QWEN3_30B_A3B, num_rows) + cycle_cases(QWEN3_30B_A3B, num_rows, 4):
            yield Entry(case, torch.bfloat16, ())
    for num_ranks in (2, 8):
        yield Entry(exchange_case(num_ranks), torch.bfloat16, ())
        yield Entry(rank_case(num_ranks, 4), torch.bfloat16, ())
    if fast:
        return
    for case in layer_cases(QWEN3_30B_A3B, 1, 4, 1024):
        yield Entry(case, torch.float32, ())
    for dims in (shard(QWEN3_30B_A3B, 2), shard(QWEN3_30B_A3B, 8), shard(KIMI_K2, 8)):
        for num_tokens in (1, 4, 16, 64):
            for case in layer_cases(dims, 1, num_tokens, 1024):
                if case.name in ("norm_route", "norm_moe_add"):
                    yield Entry(case, torch.bfloat16, ())
    for num_sequences, num_tokens in ((1, 1), (1, 4), (16, 1), (1, 64), (2, 64)):
        for case in layer_cases(QWEN3_30B_A3B, num_sequences, num_tokens, 1024):
            if case.name in ("norm_lm_head", "norm_linear_argmax", "linear_add"):
                # the kernels of norm_linear with other flags; the defaults above compile those
                continue
            for op in case.tuned:
                shipped = shipped_for(op, num_sequences, num_tokens)
                for config in (
                    *candidates_for(op, QWEN3_30B_A3B, num_sequences, num_tokens),
                    *shipped,
                ):
                    yield Entry(case, torch.bfloat16, ((op, tuple(config.items())),))


def units_of(entry: Entry, pdl: bool) -> list[Unit]:
    """What the case launches under the entry's configuration."""
    forced = {op: dict(config) for op, config in entry.forced}
    with ExitStack() as stack:
        for op, config in forced.items():
            stack.enter_context(tuning.forced(op, config))
        stack.enter_context(programmatic_launch(pdl))
        launches = stack.enter_context(recording())
        entry.case.run(opset("triton"), entry.case.make(_META, entry.dtype))
    return [unit_of(launch) for launch in launches]


def collect(fast: bool, pdl: bool) -> dict[tuple[Any, ...], tuple[Unit, bool]]:
    """Distinct units -> (unit, whether a default configuration uses it)."""
    found: dict[tuple[Any, ...], tuple[Unit, bool]] = {}
    for entry in entries(fast):
        for unit in units_of(entry, pdl):
            default = entry.is_default or found.get(unit.key, (unit, False))[1]
            found[unit.key] = (unit, default)
    return found


_units: dict[bool, list[tuple[Unit, bool]]] = {}


def _prepare(fast: bool) -> None:
    """In a worker: the parent's list again, since kernels cannot be sent between processes."""
    torch.set_num_threads(1)
    for pdl in (False, True):
        _units[pdl] = list(collect(fast, pdl).values())


def _compile(pdl: bool, index: int, capability: int) -> tuple[int, str, float]:
    """Shared memory in bytes, or -1 and the error; and the seconds it took."""
    unit, _ = _units[pdl][index]
    start = time.monotonic()
    try:
        shared = compile_unit(unit, capability)
    except Exception as error:  # noqa: BLE001 - the one place that reports compile failures
        return -1, f"{type(error).__name__}: {error}"[:600], time.monotonic() - start
    return shared, "", time.monotonic() - start


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernels.compile_all", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="defaults at two sizes only")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--arch", type=int, action="append", choices=sorted(SHARED_LIMIT_BYTES))
    parser.add_argument("--only", nargs="+", help="only these kernels")
    parser.add_argument("--json", type=Path, help="write one JSON line per unit and architecture")
    parser.add_argument("--budget", type=float, help="seconds after which the rest is left out")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("kernels.compile_all: unset TRITON_INTERPRET, the interpreter cannot compile")
        return 2
    architectures = args.arch or sorted(SHARED_LIMIT_BYTES)
    deadline_s = None if args.budget is None else time.monotonic() + args.budget
    _prepare(args.fast)
    largest: dict[tuple[str, int], int] = defaultdict(int)
    lines: list[dict[str, Any]] = []
    seconds = 0.0
    context = get_context("spawn")
    pool = (
        ProcessPoolExecutor(args.workers, context, _prepare, (args.fast,))
        if args.workers > 1
        else ThreadPoolExecutor(1)
    )
    with pool:
        wanted = []
        for capability in architectures:
            pdl = capability >= 90
            for index, (unit, default) in enumerate(_units[pdl]):
                if args.only and unit.kernel.__name__ not in args.only:
                    continue
                line = {
                    "kernel": unit.kernel.__name__, "arch": capability, "config": unit.text,
                    "default": default, "estimate_bytes": unit.estimate_bytes,
                    "limit_bytes": SHARED_LIMIT_BYTES[capability], "shared_bytes": None,
                    "verdict": "excluded", "error": None,
                }  # fmt: skip
                lines.append(line)
                # what tuning would not try there; a default runs everywhere, so it is compiled
                if default or unit.estimate_bytes <= SHARED_LIMIT_BYTES[capability]:
                    wanted.append(((pdl, index, capability), line))
        # what runs without tuning comes first
        wanted.sort(key=lambda item: not item[1]["default"])
        pending = {pool.submit(_compile, *unit): line for unit, line in wanted}
        for done, future in enumerate(as_completed(pending), 1):
            line = pending[future]
            if future.cancelled():
                line["verdict"] = "left out"
                continue
            shared, error, took = future.result()
            seconds += took
            line |= {"shared_bytes": shared, "error": error or None}
            bound = min(line["limit_bytes"], line["estimate_bytes"])
            line["verdict"] = "failed" if error or shared > bound else "compiled"
            at = line["kernel"], line["arch"]
            largest[at] = max(largest[at], shared)
            if deadline_s is not None and time.monotonic() > deadline_s:
                for other in pending:
                    other.cancel()
            if done % 50 == 0:
                print(f"{done}/{len(pending)} compiled", file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _report(architectures, largest, lines, seconds)
    return 1 if any(line["verdict"] == "failed" for line in lines) else 0


def _report(
    architectures: list[int],
    largest: dict[tuple[str, int], int],
    lines: list[dict[str, Any]],
    seconds: float,
) -> None:
    print("largest shared memory, KiB a block" + "".join(f"{f'sm_{a}':>9}" for a in architectures))
    for name in sorted({name for name, _ in largest}):
        cells = "".join(f"{largest[name, a] / 1024:9.1f}" for a in architectures)
        print(f"{name:<34}{cells}")
    excluded = [line for line in lines if line["verdict"] == "excluded"]
    for (arch, kernel), same in _grouped(excluded).items():
        most = max(line["estimate_bytes"] for line in same)
        print(
            f"excluded: sm_{arch} {kernel}: {len(same)} configurations that may need up to "
            f"{most} bytes, {same[0]['limit_bytes']} allowed (--json lists them)"
        )
    for line in lines:
        if line["verdict"] != "failed":
            continue
        reason = line["error"] or (
            f"needs {line['shared_bytes']} bytes, at most {line['estimate_bytes']} estimated, "
            f"{line['limit_bytes']} allowed"
        )
        print(f"failed: sm_{line['arch']} {line['kernel']} {line['config']}: {reason}")
    count = Counter(line["verdict"] for line in lines)
    late = f", {count['left out']} left out (budget)" if count["left out"] else ""
    print(
        f"{count['compiled']} compiled, {count['excluded']} excluded, {count['failed']} failed"
        f"{late}, {seconds:.0f} s of compiling"
    )


def _grouped(lines: list[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        found[line["arch"], line["kernel"]].append(line)
    return found


if __name__ == "__main__":
    sys.exit(main())
