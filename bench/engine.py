"""The engine on this GPU against its bars: wall and GPU time a step, peers beside, and speed-ups.

    python bench/engine.py --out DIR [--stages warm q8 q48 ...] [--budget SECONDS]

Every stage runs in a process of its own with a time limit, in the order given, until the budget is
spent; rows go to DIR/engine.jsonl as they come, each stage's output to DIR/engine.log. A stage that
fails or hangs costs only itself.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# this folder goes: here "engine" would be this file, not the package
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() != ROOT / "bench")]

from bench.engine_peers import stop_vllm  # noqa: E402 - the path comes first
from bench.engine_stages import STAGES, run_stage  # noqa: E402 - as above
from bench.engine_table import lines_of, table  # noqa: E402 - as above

_TAIL = 3000


def facts() -> dict[str, object]:
    """What the figures depend on: commit, GPU, driver, versions."""

    def output(*command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
        except (OSError, subprocess.TimeoutExpired):
            return "unknown"
        return done.stdout.strip() or "unknown"

    query = "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,temperature.gpu"
    code = "import torch, triton; print(torch.__version__, triton.__version__)"
    return {
        "commit": os.environ.get("AUTOTUNE_COMMIT")
        or output("git", "rev-parse", "--short", "HEAD"),
        "gpu": output("nvidia-smi", query, "--format=csv,noheader"),
        "torch_triton": output(sys.executable, "-c", code),
        "python": sys.version.split()[0],
    }


def run_limited(name: str, out: Path, limit_s: float) -> str:
    """Run a stage in a process group of its own; says how it ended."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--out", str(out)]
    with (out / "engine.log").open("ab") as log:
        log.write(f"=== {name}\n".encode())
        log.flush()
        at = log.tell()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True
        )
        deadline_s = time.monotonic() + limit_s
        try:
            text, _ = process.communicate(timeout=max(deadline_s - time.monotonic(), 1.0))
            how = "ok" if process.returncode == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            how = f"stopped after {limit_s:.0f} s"
        log.write(text.encode())
    print(text, end="")
    if how != "ok":
        with (out / "engine.log").open("rb") as log:
            log.seek(at)
            print(log.read().decode(errors="replace")[-_TAIL:])
    return how


def run_stages(names: list[str], out: Path, deadline_s: float) -> int:
    """Run the stages in order until the deadline; returns how many failed."""
    failed = 0
    for name in names:
        left_s = deadline_s - time.monotonic()
        if left_s < 15:
            print(f"--- {name}: left out, the budget is spent", flush=True)
            continue
        began_s = time.monotonic()
        how = run_limited(name, out, min(STAGES[name][1], left_s))
        failed += how != "ok"
        print(f"--- {name}: {how}, {time.monotonic() - began_s:.0f} s", flush=True)
    return failed


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 1 when a stage failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--budget", type=float, default=280.0, help="seconds in all")
    parser.add_argument("--child", choices=list(STAGES), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        run_stage(args.child, args.out)
        return 0
    start_s, rows_at = time.monotonic(), args.out / "engine.jsonl"
    already = len(rows_at.read_text().splitlines()) if rows_at.exists() else 0
    found = facts()
    print(json.dumps(found), flush=True)
    with (args.out / "engine.jsonl").open("a") as file:
        file.write(json.dumps({"stage": "facts", **found}) + "\n")
    try:
        failed = run_stages(args.stages, args.out, start_s + args.budget)
    finally:
        stop_vllm()
    rows = [json.loads(line) for line in rows_at.read_text().splitlines()[already:]]
    if lines := lines_of(rows):
        summary = {"stage": "table", **found, "lines": [line.as_json() for line in lines]}
        with rows_at.open("a") as file:
            file.write(json.dumps(summary) + "\n")
        print(table(lines))
        print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
