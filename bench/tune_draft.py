"""Configurations of the EAGLE-3 head's matrices on this GPU, as ``kernels.tune`` has the target's.

    python bench/tune_draft.py --path FILE [--tokens 1 4] [--workers 12]

The head of Qwen3-30B-A3B's width: fc, QKV over two hidden sizes, gate-up, down, and the draft
vocabulary. A draft step of one sequence runs them with 1 row, the extend of k = 3 with 4. Winners
go to FILE, in the form of ``kernels/configs``; merge what is wanted.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels import linear, tuning
from kernels.catalog import Case, Inputs
from kernels.opset import OpSet, opset
from kernels.timing import relative_error, rotated_inputs, time_case

HIDDEN, WIDTH, QKV, DRAFT_VOCAB = 2048, 6144, 5120, 32_000
#: name -> op, outputs, inputs, whether a residual is added
SHAPES = {
    "fc": ("linear_add", HIDDEN, 3 * HIDDEN, False),
    "qkv": ("linear_add", QKV, 2 * HIDDEN, False),
    "gate_up": ("norm_linear", 2 * WIDTH, HIDDEN, False),
    "down": ("linear_add", HIDDEN, WIDTH, True),
    "head": ("lm_head", DRAFT_VOCAB, HIDDEN, False),
}
MAX_ERROR = 0.03


def case_of(name: str, rows: int) -> Case:
    """One matrix of the head with ``rows`` rows."""
    op, outputs, inputs, adds = SHAPES[name]

    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, device=device) * scale).to(dtype)

        return {
            "x": normal(rows, inputs),
            "norm": normal(inputs, scale=0.2) + 1,
            "w": normal(outputs, inputs, scale=inputs**-0.5),
            "residual": normal(rows, outputs) if adds else None,
        }

    def run(ops: OpSet, i: Inputs) -> Any:
        if op == "linear_add":
            return ops.linear_add(i["x"], i["w"], i["residual"])
        if op == "norm_linear":
            return ops.norm_linear(i["x"], i["norm"], 1e-6, i["w"])
        return ops.norm_lm_head(i["x"], i["norm"], 1e-6, i["w"])

    return Case(
        name=name,
        tuned=(op,),
        make=make,
        run=run,
        weights=("w",),
        min_bytes=lambda i: i["w"].numel() * i["w"].element_size(),
    )


def jobs(tokens: list[int]) -> Iterator[tuple[str, int, tuning.Config]]:
    """Every configuration of every matrix; fc has no draft step's single row."""
    for rows in tokens:
        for name, (_, outputs, inputs, _) in SHAPES.items():
            if name == "fc" and rows == 1:
                continue
            for config in linear.candidates(rows, outputs, inputs):
                yield name, rows, config


def compile_one(job: tuple[str, int, tuning.Config]) -> None:
    """In a worker: run it once, which compiles it into Triton's disk cache."""
    name, rows, config = job
    case, device = case_of(name, rows), torch.device("cuda")
    try:
        with tuning.forced(case.tuned[0], config):
            case.run(opset("triton"), case.make(device, torch.bfloat16))
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - reported again when it is timed
        print(f"{name} {rows} {dict(config)}: {str(error)[:160]}", file=sys.stderr)


def main() -> int:
    """The command; exit code 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--workers", type=int, default=12)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/tune_draft.py needs a CUDA GPU", file=sys.stderr)
        return 2
    start_s, found = time.monotonic(), list(jobs(args.tokens))
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        list(pool.map(compile_one, found, chunksize=2))
    print(f"{len(found)} compiled in {time.monotonic() - start_s:.0f} s", flush=True)
    device, gpu = torch.device("cuda"), torch.cuda.get_device_name()
    for name, rows in dict.fromkeys((name, rows) for name, rows, _ in found):
        case = case_of(name, rows)
        op, inputs = case.tuned[0], rotated_inputs(case, device, torch.bfloat16)
        default_us = time_case(case, inputs, 5, False).us
        trials = []
        for config in [c for n, r, c in found if (n, r) == (name, rows)]:
            try:
                with tuning.forced(op, config):
                    if relative_error(case, inputs[0]) <= MAX_ERROR:
                        timing = time_case(case, inputs, 5, False)
                        trials.append((timing.us, config, tuning.last_used(op)[0]))
            except Exception as error:  # noqa: BLE001 - a configuration that cannot run loses
                print(f"  cannot run {name} {rows} {dict(config)}: {str(error)[:160]}")
        if not trials:
            continue
        best_us, config, key = min(trials, key=lambda trial: trial[0])
        floor_us = case.min_bytes(inputs[0]) / 4.2e12 * 1e6
        print(
            f"{rows} x {name:<8}{op:<12}{best_us:7.1f} us (default {default_us:.1f}, floor "
            f"{floor_us:.1f}) {dict(config)}",
            flush=True,
        )
        tuning.save(args.path, gpu, op, key, config)
        del inputs
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
