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
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kernels.compile_list import collect
from kernels.compile_unit import SHARED_LIMIT_BYTES, Unit, compile_unit

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
