"""Everything of the tool that needs a GPU host, each step in a process with a limit of its own.

    python -m bench.gpu_check --out DIR [--budget 150] [--only alone] [--skip oracle]

Writes ``check.log`` (each step's output) and ``check.jsonl`` (exit code and seconds) into DIR as it
goes. A step that fails or outlives its limit does not stop the next ones. Exit code 1 when one
failed. The tests of kernels are not among them: ``python -m pytest tests/kernels -m gpu``.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: output of a step that is kept in the log, bytes from its end
_KEPT_BYTES = 60_000
#: seconds that are too few for another step
_LEAST_S = 4.0

#: speculation and graphs in the search, small enough for a minute
_STUDY = """
name: gpu-check
machine: auto
target: {{path: {root}/studies/models/tiny-moe}}
draft: {{path: {root}/studies/models/tiny-moe-eagle3}}
workload:
  prompts: builtin:code
  input_len: 64
  output_len: 96
  concurrency: [1, 4]
  temperature: 0.0
backend: {{kind: engine, args: {{device: cuda}}}}
objective: {{maximize: tokens_per_s}}
constraints: {{lossless: true, max_memory_gib: 40}}
space:
  speculation.method: ["off", eagle3]
  speculation.steps: [3, 5]
  speculation.topk: [1, 2]
  speculation.draft_tokens: 8
  cuda_graph.decode: true
  cuda_graph.draft: true
  cuda_graph.verify: [true, false]
  cuda_graph.extend: true
budget: {{measured_trials: 3, server_starts: 3, wall_time: 75s}}
measure: {{warmup: 1, min_repeats: 3, max_repeats: 4, target_rel_ci: 0.02}}
seed: 0
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One process; ``allowed`` are the exit codes that mean it did its work.

    Steps of a lane follow one another and lanes run beside each other, but for ``alone``: what
    looks at memory, power and load of the GPU comes last, by itself.
    """

    lane: str
    name: str
    limit_s: float
    command: tuple[str, ...]
    allowed: tuple[int, ...] = (0,)


def steps(out: Path) -> list[Step]:
    """All steps in order; files go below ``out``."""
    python = sys.executable
    autotune = (python, "-m", "autotune.cli.main")
    pytest = (python, "-m", "pytest", "-v", "-rs", "--durations=8", "-p", "no:cacheprovider")
    gpu = (*pytest, "-m", "gpu")
    database = ("--database", f"sqlite:///{out / 'check.db'}")
    best = str(out / "best.yaml")
    engine = (python, "-m", "engine")
    bench = (*engine, "bench", "--config", best, "--concurrency", "1,4")
    generate = (*engine, "generate", "--config", best, "--prompt", "def add(a, b):")
    study = out / "gpu-check.yaml"
    study.write_text(_STUDY.format(root=ROOT))
    host = str(out / "host.yaml")
    return [
        Step("study", "probe", 60, (*autotune, "probe", "--device", "cuda", "-o", host, "--force")),
        Step("study", "study", 120, (*autotune, "study", "start", str(study), *database)),
        Step("study", "report", 20, (*autotune, "study", "report", "gpu-check", *database)),
        Step("study", "best", 20, (*autotune, "study", "best", "gpu-check", *database, "-o", best)),
        Step("study", "engine-bench", 60, bench),
        Step("study", "engine-generate", 60, (*generate, "--max-new-tokens", "24")),
        # what is wrong with a rented machine is not ours to fail on: 1 means an error was found
        Step("tests", "doctor", 40, (*autotune, "doctor"), (0, 1)),
        Step("tests", "contract", 150, (*gpu, "tests/contracts/test_backend_contract.py",
                                        "tests/contracts/test_engine_backend.py",
                                        "tests/contracts/test_gpu_output.py")),
        Step("tests", "oracle", 150, (*gpu, "tests/oracle")),
        # minutes: only when asked for
        Step("long", "gpu-study", 420, (*autotune, "study", "start", str(ROOT / "studies/gpu.yaml"),
                                        *database, "-o", str(out / "gpu.best.yaml"))),
        Step("long", "gpu-report", 30, (*autotune, "study", "report", "gpu", *database)),
        Step("alone", "failures", 150, (*gpu, "tests/contracts/test_gpu_failures.py")),
        Step("alone", "host", 100, (*gpu, "tests/unit/test_probe.py",
                                    "tests/contracts/test_gpu_host.py")),
    ]  # fmt: skip


class Run:
    """Runs steps and writes what came of each, from several threads."""

    def __init__(self, out: Path, budget_s: float) -> None:
        self.out, self.end_s = out, time.monotonic() + budget_s
        self.failed: list[str] = []
        self._lock = threading.Lock()

    def lane(self, chosen: Sequence[Step]) -> None:
        """Steps one after the other."""
        for step in chosen:
            left_s = self.end_s - time.monotonic()
            if left_s < _LEAST_S:
                row: dict[str, Any] = {"step": step.name, "ok": False, "last_line": "no time left"}
                self._keep(row, b"")
            else:
                self._keep(*self._run(step, min(step.limit_s, left_s)))

    def _run(self, step: Step, limit_s: float) -> tuple[dict[str, Any], bytes]:
        """Run a step in a session of its own, which is ended as a whole."""
        began_s = time.monotonic()
        output = self.out / f"{step.name}.out"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            # what a step leaves running would be measured with the next one
            left = end_session(process)
        text = output.read_bytes()[-_KEPT_BYTES:]
        output.unlink()
        row = {
            "step": step.name,
            "ok": code in step.allowed and not left,
            "exit_code": code,
            "seconds": round(time.monotonic() - began_s, 1),
            "limit_s": round(limit_s, 1),
            "left_running": left,
            "last_line": text.decode(errors="replace").strip().rpartition("\n")[2][-200:],
        }
        head = f"\n=== {step.name}: {' '.join(step.command)}\n"
        return row, head.encode() + text

    def _keep(self, row: dict[str, Any], text: bytes) -> None:
        with self._lock:
            with (self.out / "check.log").open("ab") as log:
                log.write(text)
            with (self.out / "check.jsonl").open("a") as rows:
                rows.write(json.dumps(row) + "\n")
            self.failed += [] if row["ok"] else [row["step"]]
            mark = "ok" if row["ok"] else "FAILED"
            print(f"{row['step']:16} {mark:6} {row.get('seconds', 0):6} s  "
                  f"{row['last_line'][:110]}", flush=True)  # fmt: skip


def end_session(process: "subprocess.Popen[bytes]") -> bool:
    """End what is left of a step; whether something was, after the step itself had ended."""
    ended = process.poll() is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    process.wait()
    return ended


def environment() -> Mapping[str, str]:
    """Ours, with the repository in front of the path."""
    path = os.environ.get("PYTHONPATH")
    parts = [str(ROOT), *([path] if path else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(parts), "PYTHONUNBUFFERED": "1"}


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for all steps")
    parser.add_argument("--only", default="", help="steps or lanes, comma separated")
    parser.add_argument("--skip", default="", help="steps or lanes, comma separated")
    args = parser.parse_args(argv)
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("check.db", "check.log", "check.jsonl", "best.yaml"):
        # an older run's study would be resumed
        (out / name).unlink(missing_ok=True)
    only, skip = set(filter(None, args.only.split(","))), set(filter(None, args.skip.split(",")))
    chosen = steps(out)
    known = {step.name for step in chosen} | {step.lane for step in chosen}
    if unknown := (only | skip) - known:
        parser.error(f"unknown {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    chosen = [
        step
        for step in chosen
        if (only & {step.name, step.lane} or not (only or step.lane == "long"))
        and not skip & {step.name, step.lane}
    ]
    run = Run(out, args.budget)
    lanes = [
        threading.Thread(target=run.lane, args=([s for s in chosen if s.lane == lane],))
        for lane in ("study", "tests", "long")
    ]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    run.lane([step for step in chosen if step.lane == "alone"])
    failed = run.failed
    print(f"failed: {', '.join(failed)}" if failed else "all steps did their work")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
