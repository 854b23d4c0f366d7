"""CPU seconds of the commands that people wait for, each in a fresh process.

python bench/cli_speed.py [--repeats N] [--json]

Prints n, median and range of user + system seconds of the whole command, imports included, beside
its bar. CPU time, because on a shared machine wall time tells about the neighbours.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAUNCH = (
    "python -m sglang.launch_server --model-path Qwen/Qwen3-235B-A22B --tp 8 "
    "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 16"
)
LINT = (
    "lint", "--engine", "sglang", "--version", "0.5.9", "--args", LAUNCH,
    "--env", "NCCL_ALGO=Ring NCCL_PROTO=LL NCCL_P2P_LEVEL=SYS",
)  # fmt: skip
STUDY = "studies/kimi-k2.5-8x-rtx-pro-6000.yaml"
COMMANDS = (
    "study", "lint", "env", "doctor", "probe", "compare", "diff", "model", "explain", "dashboard",
    "predict",
)  # fmt: skip


def cases(url: str) -> list[tuple[str, Sequence[str], float | None]]:
    """(label, arguments, bar in CPU seconds or None)."""
    found: list[tuple[str, Sequence[str], float | None]] = [("--help", ["--help"], 0.5)]
    found += [(f"{name} --help", [name, "--help"], 0.5) for name in COMMANDS]
    found.append(("lint", LINT, 1.0))
    for machine in ("8x-rtx-pro-6000-switches", "8x-l40s"):
        on = [*LINT, "--machine", machine, "--target", "qwen3-235b-a22b"]
        found.append((f"lint --machine {machine} --target", on, 1.0))
    found.append(("explain (10,000 measurements)", ["explain", "5", "--database", url], 2.0))
    found.append(("diff (10,000 measurements)", ["diff", "0", "7", "--database", url], 2.0))
    found.append(("predict kimi-k2.5 --top 5", ["predict", STUDY, "--top", "5"], None))
    return found


def cpu_s(arguments: Sequence[str]) -> float:
    """User and system seconds of one run; raises when the command itself breaks."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "autotune.cli.main", *arguments],
        capture_output=True,
        cwd=ROOT,
        # threads that spin count as CPU time
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # lint ends with 1 when it finds an error, which these lines contain
    if done.returncode not in (0, 1) or b"Traceback" in done.stderr:
        raise RuntimeError(f"{arguments[0]}: {done.stderr.decode()[-400:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def database(folder: Path) -> str:
    """A made study of 10,000 measurements."""
    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    from explain_database import add_trial, fill, make_study

    made = make_study(folder)
    add_trial(made, made.plan.baseline, role="baseline")
    fill(made, 10_000, repeats=20)
    return str(made.store.url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for label, arguments, bar in cases(database(Path(folder))):
            times = [cpu_s(arguments) for _ in range(options.repeats)]
            rows.append({"command": label, "cpu_s": times, "bar_s": bar})
            if not options.json:
                limit = "no bar" if bar is None else f"bar {bar:g} s"
                print(
                    f"{label:55} n={len(times)} median {statistics.median(times):.2f} s CPU "
                    f"({min(times):.2f}-{max(times):.2f}; {limit})",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=2))
    sys.exit(
        any(r["bar_s"] is not None and statistics.median(r["cpu_s"]) > r["bar_s"] for r in rows)
    )


if __name__ == "__main__":
    main()
