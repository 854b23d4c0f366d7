"""Find the fastest configuration of each kernel on this GPU and keep it in the cache.

    python -m kernels.tune [--tp 1 2] [--tokens 1x1 1x4 16x1] [--path FILE] [--budget-s 100]

``1x4`` is one sequence of four tokens (a verify), ``16x1`` sixteen sequences of one (a decode).
Configurations are compiled in parallel first (Triton's disk cache), then timed alone with a cold
L2. One that is wrong or does not fit the GPU is passed over and reported. The last line of a case
says how much slower it is without tuning. Only this command writes the cache.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kernels import tuning
from kernels.candidates import candidates_for
from kernels.catalog import (
    KIMI_K2,
    MIXTRAL_8X7B_TP8,
    QWEN3_30B_A3B,
    Case,
    Dims,
    layer_cases,
    shard,
)
from kernels.launch import recording
from kernels.opset import opset
from kernels.shared_memory import fitting
from kernels.timing import Timing, relative_error, rotated_inputs, time_case

MODELS = {dims.name: dims for dims in (QWEN3_30B_A3B, MIXTRAL_8X7B_TP8, KIMI_K2)}
#: sequences x tokens each; the most valuable first
SIZES = ("1x4", "1x1", "16x1", "1x64", "4x1")
#: relative error up to which a bf16 result counts as right
MAX_ERROR = 0.03


def parse_size(text: str) -> tuple[int, int]:
    """``"16x1"`` -> (sequences, tokens each); "4" is four tokens of one sequence."""
    parts = text.split("x")
    try:
        sequences, tokens = (int(parts[0]), int(parts[1])) if len(parts) == 2 else (1, int(text))
    except ValueError:
        sequences = tokens = 0
    if sequences < 1 or tokens < 1:
        raise ValueError(f"--tokens {text!r}: expected SEQUENCESxTOKENS, for example 16x1")
    return sequences, tokens


Job = tuple[str, tuning.Config]


@dataclass(frozen=True, slots=True)
class Work:
    """One case at one size, with the configurations to try."""

    dims: Dims
    size: tuple[int, int]
    case: Case
    jobs: list[Job]


def _force(
    stack: ExitStack, op: str, config: tuning.Config, best: dict[str, tuning.Config]
) -> None:
    """Force ``config`` for ``op``, and one choice for the MoE's other half."""
    stack.enter_context(tuning.forced(op, config))
    if op == "moe_down" and "moe_gate_up" in best:
        stack.enter_context(tuning.forced("moe_gate_up", best["moe_gate_up"]))


def _candidates(op: str, dims: Dims, size: tuple[int, int]) -> list[tuning.Config]:
    """What this GPU has the shared memory for."""
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    return fitting(op, candidates_for(op, dims, *size), limit, 2, dims.head_size, dims.experts)


def defaults_of(case: Case) -> dict[str, tuple[str, tuning.Config]]:
    """Each op of the case: the key of its shape, and what it runs with where nothing is tuned."""
    with recording():
        case.run(opset("triton"), case.make(torch.device("meta"), torch.bfloat16))
    return {op: tuning.last_used(op)[:2] for op in case.tuned}


def _warm(dims: Dims, size: tuple[int, int], context: int, name: str, jobs: list[Job]) -> None:
    """In a worker: run each configuration once, which compiles it into Triton's disk cache."""
    device = torch.device("cuda")
    dims = replace(dims, vocab=min(dims.vocab, 8192))
    case = next(c for c in layer_cases(dims, *size, context) if c.name == name)
    inputs = case.make(device, torch.bfloat16)
    for op, config in jobs:
        try:
            with ExitStack() as stack:
                _force(stack, op, config, {})
                case.run(opset("triton"), inputs)
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - reported again when it is timed
            print(f"{name} {op} {config}: {str(error)[:200]}", file=sys.stderr)


def _compile_all(
    work: list[Work], context: int, workers: int, seconds: float
) -> set[tuple[Any, ...]]:
    """Compile in parallel for at most ``seconds``; which (case, size, op, configuration) is ready.

    Jobs are taken in turn from every case, so that what time cuts off is the tail of each.
    """
    queues = [
        [(item, part) for part in [item.jobs[i : i + 3] for i in range(0, len(item.jobs), 3)]]
        for item in work
    ]
    turns = [job for turn in zip_longest(*queues) for job in turn if job is not None]
    ready: set[tuple[Any, ...]] = set()
    end = time.monotonic() + seconds
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    futures = {
        pool.submit(_warm, item.dims, item.size, context, item.case.name, part): (item, part)
        for item, part in turns
    }
    try:
        for future in as_completed(futures, timeout=max(0.0, end - time.monotonic())):
            item, part = futures[future]
            if future.exception() is None:
                ready |= {_identity(item, op, config) for op, config in part}
    except TimeoutError:
        print(f"compiling stopped after {seconds:.0f} s", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    return ready


def _identity(item: Work, op: str, config: tuning.Config) -> tuple[Any, ...]:
    return (item.dims, item.case.name, item.size, op, tuple(sorted(config.items())))


def tune_case(
    item: Work,
    path: Path,
    pdl: bool,
    seconds: float,
    log: list[dict[str, object]],
    ready: set[tuple[Any, ...]] | None,
) -> None:
    """Time the candidates of every op of the case and write the winners.

    Stops trying after ``seconds`` once an op has a winner; ``ready`` (None: all) names what is
    compiled.
    """
    device, case = torch.device("cuda"), item.case
    gpu = torch.cuda.get_device_name(device)
    inputs = rotated_inputs(case, device, torch.bfloat16)
    best: dict[str, tuning.Config] = {}
    start = time.monotonic()
    for number, op in enumerate(case.tuned, 1):
        trials: list[tuple[Timing, tuning.Config, str]] = []
        for config in [config for name, config in item.jobs if name == op]:
            if ready is not None and _identity(item, op, config) not in ready:
                continue
            if trials and time.monotonic() - start > seconds * number / len(case.tuned):
                print(f"  {op}: out of time after {len(trials)} configurations")
                break
            line = _line(item, op, config)
            log.append(line)
            try:
                with ExitStack() as stack:
                    _force(stack, op, config, best)
                    line["error"] = error = relative_error(case, inputs[0])
                    if error > MAX_ERROR:
                        print(f"  wrong: {op} {dict(config)}: relative error {error:.3g}")
                        continue
                    timing = time_case(case, inputs, 5, pdl)
                    line["us"] = timing.us
                    trials.append((timing, config, tuning.last_used(op)[0]))
            except Exception as failure:  # noqa: BLE001 - a configuration that cannot run loses
                text = str(failure).splitlines()[0][:160] if str(failure) else repr(failure)
                line["failure"] = text
                print(f"  cannot run: {op} {dict(config)}: {text}")
        if not trials:
            continue
        timing, config, key = min(trials, key=lambda trial: trial[0].us)
        best[op] = config
        tuning.save(path, gpu, op, key, config)
        print(
            f"{item.size[0]}x{item.size[1]} {case.name:<14}{op:<14}{timing.us:8.1f} us of "
            f"{len(trials)} {key} {dict(config)}",
            flush=True,
        )
    if len(best) == len(case.tuned):
        _against_defaults(item, inputs, best, pdl, log)


def _line(item: Work, op: str, config: tuning.Config) -> dict[str, object]:
    size = f"{item.size[0]}x{item.size[1]}"
    return {"model": item.dims.name, "case": item.case.name, "size": size, "op": op,
            "config": dict(config)}  # fmt: skip


def _against_defaults(
    item: Work,
    inputs: list[dict[str, Any]],
    best: dict[str, tuning.Config],
    pdl: bool,
    log: list[dict[str, object]],
) -> None:
    """Print what the case takes without tuning and with the winners."""
    plain = {op: config for op, (_, config) in defaults_of(item.case).items()}
    took: list[Timing] = []
    for chosen in (plain, best, plain, best):
        with ExitStack() as stack:
            for op, config in chosen.items():
                stack.enter_context(tuning.forced(op, config))
            took.append(time_case(item.case, inputs, 5, pdl))
    without, tuned = (min(took[i::2], key=lambda t: t.us) for i in (0, 1))
    log.append(_line(item, "default", {}) | {"defaults": plain, "us": without.us})
    log.append(_line(item, "best", {}) | {"best": best, "us": tuned.us})
    print(
        f"{item.size[0]}x{item.size[1]} {item.case.name:<14}default {without.us:.1f} us, tuned "
        f"{tuned.us:.1f}, ratio {without.us / tuned.us:.3f}  {item.dims.name} {plain}",
        flush=True,
    )


def _plan(
    shards: list[Dims], sizes: list[tuple[int, int]], context: int, names: list[str] | None
) -> list[Work]:
    """The cases to tune, each with its defaults and the candidates; every shape once."""
    work: list[Work] = []
    planned: set[tuple[tuple[str, str], ...]] = set()
    for dims in shards:
        for size in sizes:
            for case in layer_cases(dims, *size, context):
                if case.name == "norm_linear_argmax" or (names and case.name not in names):
                    continue
                candidates = {op: _candidates(op, dims, size) for op in case.tuned}
                if not all(candidates.values()):
                    continue
                plain = defaults_of(case)
                shape = tuple((op, key) for op, (key, _) in plain.items())
                if shape in planned:
                    continue
                planned.add(shape)
                jobs = [
                    (op, config)
                    for op, (_, first) in plain.items()
                    for config in (first, *(c for c in candidates[op] if c != first))
                ]
                work.append(Work(dims, size, case, jobs))
    return work


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernels.tune", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default=QWEN3_30B_A3B.name)
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="shards of so many GPUs")
    parser.add_argument("--tokens", nargs="+", default=list(SIZES))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--ops", nargs="+", help="only cases of these names")
    parser.add_argument("--path", type=Path, default=tuning.default_path())
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="seconds in all, about")
    parser.add_argument("--log", type=Path, help="write every timing as a JSON line")
    parser.add_argument("--pdl", action="store_true", help="time with programmatic launch")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("kernels.tune needs a CUDA GPU", file=sys.stderr)
        return 2
    try:
        sizes = [parse_size(text) for text in args.tokens]
        shards = [shard(MODELS[args.model], ways) for ways in args.tp]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    work = _plan(shards, sizes, args.context, args.ops)
    start = time.monotonic()
    ready = None
    if args.workers > 1:
        ready = _compile_all(work, args.context, args.workers, args.budget_s * 0.55)
    count = sum(len(item.jobs) for item in work)
    done = "" if ready is None else f"{len(ready)} of "
    print(f"{done}{count} compiled in {time.monotonic() - start:.0f} s", flush=True)
    log: list[dict[str, object]] = []
    for number, item in enumerate(work):
        left = args.budget_s - (time.monotonic() - start)
        weight = sum(len(later.jobs) for later in work[number:])
        seconds = max(0.0, left * len(item.jobs) / weight)
        tune_case(item, args.path, args.pdl, seconds, log, ready)
        torch.cuda.empty_cache()
        if args.log:
            args.log.write_text("".join(json.dumps(line) + "\n" for line in log))
    print(f"{time.monotonic() - start:.0f} s; written to {args.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
