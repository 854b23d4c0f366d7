"""Every kernel on this GPU: right or wrong, and its time against its memory floor.

    python bench/kernels.py --json OUT [--tokens 1x1 1x4 16x1 1x64] [--layers 8] [--tune]

Shapes of Qwen3-30B-A3B, bf16, context 1024, random weights; needs torch and triton only. Kernel
times are per call inside a CUDA graph with rotated weights (cold L2), without and with programmatic
dependent launch (each compiles its own kernels: ``--pdl off`` or ``on`` halves that); the floor is
bytes / 4.2 TB/s (--bandwidth for another GPU). Then one whole forward (``--layers`` layers and the
head, greedy) captured as the engine would capture it. One JSON line per row goes to --json. Exit
code 1 when a kernel deviates from its reference.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels import tune, tuning
from kernels.basic_cases import basic_cases
from kernels.catalog import QWEN3_30B_A3B, Case, layer_cases, touched_experts
from kernels.forward import build_forward
from kernels.launch import programmatic_launch
from kernels.linear_route import MAX_TOKENS
from kernels.timing import relative_error, rotated_inputs, time_calls, time_case

DEVICE = torch.device("cuda")
MAX_ERROR = 0.03


def bench_case(case: Case, bandwidth: float, replays: int, modes: list[bool]) -> dict[str, object]:
    """One row: error against the reference, microseconds without and with PDL, floor."""
    inputs = rotated_inputs(case, DEVICE, torch.bfloat16)
    row: dict[str, object] = {"kernel": case.name}
    with programmatic_launch(modes[0]):
        row["error"] = relative_error(case, inputs[0])
    timings = {pdl: time_case(case, inputs, replays, pdl) for pdl in modes}
    floor = sum(case.min_bytes(i) for i in inputs[:8]) / len(inputs[:8]) / bandwidth * 1e6
    row |= {("pdl_us" if pdl else "us"): timing.us for pdl, timing in timings.items()}
    row |= {("pdl_range" if pdl else "range"): [timing.low_us, timing.high_us]
            for pdl, timing in timings.items()}  # fmt: skip
    row |= {
        "floor_us": floor,
        "share": floor / min(timing.us for timing in timings.values()),
        "config": {op: dict(tuning.last_used(op)[1]) for op in case.tuned},
        "config_source": {op: tuning.last_used(op)[2] for op in case.tuned},
    }
    return row


def bench_forward(
    num_layers: int, size: tuple[int, int], bandwidth: float, replays: int, modes: list[bool]
) -> list[dict[str, object]]:
    """The whole forward, apart and joined, without and with PDL, and its routing's spread."""
    forward = build_forward(QWEN3_30B_A3B, num_layers, size, 1024, DEVICE, torch.bfloat16)
    rows = []
    # the projection and the router apart, then as one kernel where one can serve the tokens
    ways = [(joined, pdl) for joined in (False, True) for pdl in modes]
    for joined, pdl in ways if size[0] * size[1] <= MAX_TOKENS else ways[: len(modes)]:
        forward.fused = joined
        timing = time_calls([forward.run], replays, pdl)
        distinct = [touched_experts(expert) for expert in forward.experts]
        floor = forward.min_bytes(sum(distinct) / len(distinct)) / bandwidth * 1e6
        rows.append(
            {
                "kernel": f"forward of {num_layers} layers" + (", joined" if joined else "")
                + (", PDL" if pdl else ""),
                "us": timing.us, "low_us": timing.low_us, "high_us": timing.high_us,
                "floor_us": floor, "share": floor / timing.us,
                "distinct_experts": sum(distinct) / len(distinct),
                "token": [int(t) for t in forward.token[:4]],
            }
        )  # fmt: skip
    return rows


def show(row: dict[str, object]) -> None:
    """One line of the table."""
    error = row.get("error")
    config = json.dumps(row.get("config", {})).replace('"', "")
    print(
        f"{row['size']:>6} {row['kernel']:<26}{row.get('us', float('nan')):10.1f}"
        f"{row.get('pdl_us', float('nan')):10.1f}{row.get('floor_us', float('nan')):10.1f}"
        f"{row.get('share', float('nan')):8.2f}"
        f"{'' if error is None else f'{error:10.2g}'}  {row.get('failure') or config}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tokens", nargs="+", default=["1x1", "1x4", "16x1", "1x64"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bandwidth", type=float, default=4.2e12, help="bytes a second")
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--basic", action="store_true", help="the unfused ops too")
    parser.add_argument("--tune", action="store_true", help="tune first (minutes)")
    parser.add_argument("--pdl", choices=("both", "on", "off"), default="both")
    parser.add_argument("--only-forward", action="store_true")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench/kernels.py needs a CUDA GPU", file=sys.stderr)
        return 2
    sizes = [tune.parse_size(text) for text in args.tokens]
    if args.tune and tune.main(["--tokens", *args.tokens]) != 0:
        return 1
    modes = {"both": [False, True], "on": [True], "off": [False]}[args.pdl]
    start, wrong = time.monotonic(), 0
    properties = torch.cuda.get_device_properties(DEVICE)
    print(
        f"{properties.name}, torch {torch.__version__}, floor at {args.bandwidth / 1e12:.2f} TB/s"
    )
    print(f"{'size':>6} {'kernel':<26}{'us':>10}{'PDL us':>10}{'floor us':>10}{'share':>8}"
          f"{'error':>10}  config")  # fmt: skip
    with args.json.open("w") as file:

        def emit(size: tuple[int, int], row: dict[str, object]) -> None:
            row = {"size": f"{size[0]}x{size[1]}", "gpu": properties.name, **row}
            show(row)
            file.write(json.dumps(row) + "\n")
            file.flush()

        for size in sizes:
            cases = [] if args.only_forward else layer_cases(QWEN3_30B_A3B, *size, 1024)
            if args.basic and size == (1, 4):
                cases += basic_cases(QWEN3_30B_A3B, *size, 1024)
            for case in cases:
                try:
                    row = bench_case(case, args.bandwidth, args.replays, modes)
                    wrong += float(row["error"]) > MAX_ERROR  # type: ignore[arg-type]
                except Exception as error:  # noqa: BLE001 - one kernel's failure must not hide others
                    row = {"kernel": case.name, "failure": f"{type(error).__name__}: {error}"[:500]}
                    wrong += 1
                emit(size, row)
                torch.cuda.empty_cache()
            try:
                for row in bench_forward(args.layers, size, args.bandwidth, args.replays, modes):
                    emit(size, row)
            except Exception as error:  # noqa: BLE001 - as above
                emit(
                    size, {"kernel": "forward", "failure": f"{type(error).__name__}: {error}"[:500]}
                )
                wrong += 1
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - start:.0f} s, {wrong} kernels wrong or failing")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
