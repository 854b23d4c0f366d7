"""Find the fastest configuration of each kernel on this GPU and keep it in the cache.

    python -m kernels.tune [--tokens 1 1x4 16x1 1x64] [--path FILE] [--workers N] [--pdl]

``1x4`` is one sequence of four tokens (a verify), ``16x1`` sixteen sequences of one (a decode).
Configurations are compiled in parallel first (Triton's disk cache), then timed alone with a cold
L2. One that is wrong or does not fit the GPU is passed over and reported. Only this command writes
the cache.
"""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from kernels import moe_down, moe_gate_up, tuning
from kernels.catalog import MIXTRAL_8X7B_TP8, QWEN3_30B_A3B, Case, Dims, layer_cases
from kernels.compile_all import candidates_for
from kernels.opset import opset
from kernels.shared_memory import fitting
from kernels.timing import Timing, relative_error, rotated_inputs, time_case

MODELS = {dims.name: dims for dims in (QWEN3_30B_A3B, MIXTRAL_8X7B_TP8)}
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


def _force(
    stack: ExitStack, op: str, config: tuning.Config, best: dict[str, tuning.Config]
) -> None:
    """Force ``config`` for ``op``, and something that goes with it for the MoE's other half."""
    stack.enter_context(tuning.forced(op, config))
    if op == "moe_down":
        other = best.get("moe_gate_up")
        if config["scheme"] == moe_down.STATIONARY and (other is None or other["vector"]):
            other = moe_gate_up.default_config(2, 2, 2)
        if other is not None:
            stack.enter_context(tuning.forced("moe_gate_up", other))
    if op == "moe_gate_up":
        # timed together with a second half that accepts both kinds of first half
        second = {"scheme": moe_down.GROUPED, "block_t": 16, "block_o": 64, "block_i": 64,
                  "stages": 3, "num_warps": 4}  # fmt: skip
        stack.enter_context(tuning.forced("moe_down", second))


def _candidates(op: str, dims: Dims, size: tuple[int, int]) -> list[tuning.Config]:
    """What this GPU has the shared memory for."""
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    return fitting(op, candidates_for(op, dims, *size), limit, 2, dims.head_size, dims.experts)


def _warm(model: str, size: tuple[int, int], context: int, name: str, jobs: list) -> None:
    """In a worker: run each configuration once, which compiles it into Triton's disk cache."""
    device = torch.device("cuda")
    dims = replace(MODELS[model], vocab=min(MODELS[model].vocab, 8192))
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


def tune_case(
    case: Case, dims: Dims, size: tuple[int, int], path: Path, pdl: bool
) -> dict[str, tuple[tuning.Config, Timing]]:
    """Time every candidate of every op of the case; write the winners; return them."""
    device = torch.device("cuda")
    gpu = torch.cuda.get_device_name(device)
    inputs = rotated_inputs(case, device, torch.bfloat16)
    best: dict[str, tuning.Config] = {}
    found: dict[str, tuple[tuning.Config, Timing]] = {}
    for op in case.tuned:
        trials: list[tuple[Timing, tuning.Config, str]] = []
        for config in _candidates(op, dims, size):
            try:
                with ExitStack() as stack:
                    _force(stack, op, config, best)
                    error = relative_error(case, inputs[0])
                    if error > MAX_ERROR:
                        print(f"  wrong: {op} {dict(config)}: relative error {error:.3g}")
                        continue
                    timing = time_case(case, inputs, 5, pdl)
                    trials.append((timing, config, tuning.last_used(op)[0]))
            except Exception as failure:  # noqa: BLE001 - a configuration that cannot run loses
                print(f"  cannot run: {op} {dict(config)}: {str(failure).splitlines()[0][:160]}")
        if not trials:
            continue
        timing, config, key = min(trials, key=lambda trial: trial[0].us)
        best[op] = config
        found[op] = (config, timing)
        tuning.save(path, gpu, op, key, config)
        print(f"{case.name:<20}{op:<14}{key}: {timing.us:.1f} us {dict(config)}", flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernels.tune", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default=QWEN3_30B_A3B.name)
    parser.add_argument("--tokens", nargs="+", default=["1x1", "1x4", "16x1", "1x64"])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--ops", nargs="+", help="only cases of these names")
    parser.add_argument("--path", type=Path, default=tuning.default_path())
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--pdl", action="store_true", help="time with programmatic launch")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("kernels.tune needs a CUDA GPU", file=sys.stderr)
        return 2
    try:
        sizes = [parse_size(text) for text in args.tokens]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    dims = MODELS[args.model]
    work = [
        (size, case)
        for size in sizes
        for case in layer_cases(dims, *size, args.context)
        if case.name != "norm_linear_argmax" and (not args.ops or case.name in args.ops)
    ]
    start = time.monotonic()
    if args.workers > 1:
        with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
            waiting = []
            for size, case in work:
                jobs = [(op, c) for op in case.tuned for c in _candidates(op, dims, size)]
                for part in range(0, len(jobs), 4):
                    waiting.append(
                        pool.submit(
                            _warm, args.model, size, args.context, case.name, jobs[part : part + 4]
                        )
                    )
            for future in waiting:
                future.result()
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    for size, case in work:
        tune_case(case, dims, size, args.path, args.pdl)
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - start:.0f} s; written to {args.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
