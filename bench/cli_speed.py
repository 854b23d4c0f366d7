"""CPU and wall seconds of the commands that people wait for, each in a fresh process.

python bench/cli_speed.py [--repeats N] [--only WORD] [--json]

Prints n, median and range of user + system seconds of the whole command, imports included, beside
its bar, then the wall clock's median and the load of the host: on a shared machine wall time tells
about the neighbours, and CPU time grows too where they share a core. Modules are compiled before,
as by `make install` or a first start; compiling ours at each start costs about 1 s more.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
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


#: a long line: everything that lint predicts for, on the shapes with the most experts
LONG = (
    "python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp 8 --ep-size 8 "
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path draft "
    "--speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 32 "
    "--cuda-graph-max-bs 64 --mem-fraction-static 0.92 --chunked-prefill-size 8192 "
    "--attention-backend trtllm_mla --moe-runner-backend flashinfer_trtllm --enable-dp-attention "
    "--disable-overlap-schedule --max-running-requests 64 --trust-remote-code "
) + " ".join(f"--lora-paths adapter{n}=/models/adapter{n}" for n in range(40))
LONG_ENV = (
    "NCCL_ALGO=Ring NCCL_PROTO=LL NCCL_P2P_LEVEL=SYS NCCL_MIN_NCHANNELS=16 NCCL_MAX_NCHANNELS=32 "
    "NCCL_NTHREADS=512 NCCL_BUFFSIZE=8388608 NCCL_SHM_DISABLE=0 NCCL_P2P_DISABLE=0 "
) + " ".join(f"SERVICE_{n}_PORT=tcp://10.0.0.{n % 250}:80" for n in range(400))


def lint_cases() -> list[tuple[str, Sequence[str], float | None]]:
    """Lines, machines and shapes; the bar is the same for all."""
    found: list[tuple[str, Sequence[str], float | None]] = [("lint", LINT, 1.0)]
    for machine in ("8x-rtx-pro-6000-switches", "8x-l40s"):
        on = [*LINT, "--machine", machine, "--target", "qwen3-235b-a22b"]
        found.append((f"lint --machine {machine} --target", on, 1.0))
    for shape in ("kimi-k2.5", "deepseek-v3"):
        on = [
            "lint", "--engine", "sglang", "--version", "0.5.9", "--args", LONG, "--env", LONG_ENV,
            "--machine", "8x-rtx-pro-6000-direct", "--target", shape,
        ]  # fmt: skip
        found.append((f"lint, long line and environment, {shape}", on, 1.0))
    return found


def cases(few: str, many: str) -> list[tuple[str, Sequence[str], float | None]]:
    """(label, arguments, bar in CPU seconds or None); databases of few and many trials."""
    found: list[tuple[str, Sequence[str], float | None]] = [("--help", ["--help"], 0.5)]
    found += [(f"{name} --help", [name, "--help"], 0.5) for name in COMMANDS]
    found += lint_cases()
    for what, url in (("500 trials x 20", few), ("2,500 trials x 4", many)):
        found.append((f"explain, {what}", ["explain", "5", "--database", url], 2.0))
        found.append((f"diff, {what}", ["diff", "0", "7", "--database", url], 2.0))
    found.append(("explain STUDY.yaml", ["explain", STUDY], None))
    found.append(("study status", ["study", "status", "wide", "--database", many], None))
    found.append(("study report", ["study", "report", "wide", "--database", many], None))
    found.append(("predict kimi-k2.5 --top 5", ["predict", STUDY, "--top", "5"], None))
    return found


def seconds(arguments: Sequence[str], bytecode: Path) -> tuple[float, float]:
    """CPU and wall seconds of one run; raises when the command itself breaks.

    ``bytecode``: folder of the compiled modules.
    """
    # threads that spin count as CPU time
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(bytecode)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "autotune.cli.main", *arguments],
        capture_output=True,
        cwd=ROOT,
        env=env,
    )
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # lint ends with 1 when it finds an error, which these lines contain
    if done.returncode not in (0, 1) or b"Traceback" in done.stderr:
        raise RuntimeError(f"{arguments[0]}: {done.stderr.decode()[-400:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


def databases(folder: Path) -> tuple[str, str]:
    """Made studies of 10,000 measurements: few trials of a small space, many of a wide one."""
    sys.path[:0] = [str(ROOT / "tests" / "unit"), str(ROOT / "bench")]
    from explain_database import add_trial, fill, make_study
    from wide_database import wide_database

    (folder / "few").mkdir()
    (folder / "many").mkdir()
    made = make_study(folder / "few")
    add_trial(made, made.plan.baseline, role="baseline")
    fill(made, 10_000, repeats=20)
    made.store.close()
    return str(made.store.url), wide_database(folder / "many", 2_500, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose label holds this word")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = [case for case in cases(*databases(Path(folder))) if options.only in case[0]]
        for label, arguments, bar in chosen:
            # the first run compiles
            runs = [
                seconds(arguments, Path(folder) / "bytecode") for _ in range(options.repeats + 1)
            ][1:]
            cpu, wall = [run[0] for run in runs], [run[1] for run in runs]
            load = os.getloadavg()[0]
            rows.append(
                {"command": label, "cpu_s": cpu, "wall_s": wall, "load": load, "bar_s": bar}
            )
            if not options.json:
                limit = "no bar" if bar is None else f"bar {bar:g} s"
                print(
                    f"{label:48} n={len(cpu)} median {statistics.median(cpu):.2f} s CPU "
                    f"({min(cpu):.2f}-{max(cpu):.2f}; {limit}), {statistics.median(wall):.2f} s "
                    f"wall, load {load:.1f}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=2))
    sys.exit(
        any(r["bar_s"] is not None and statistics.median(r["cpu_s"]) > r["bar_s"] for r in rows)
    )


if __name__ == "__main__":
    main()
