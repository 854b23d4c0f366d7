"""Time and memory of parsing a large NCCL log: bar 100 MB in under 5 s and 200 MB.

usage: python bench/nccl_log_speed.py [--mb 100] [--kind choices|timestamps|mixed]

Makes the log from a real one by repeating what a long run repeats (choice lines of both kinds,
other collectives, proxy and network chatter) and parses it in a fresh process.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "tests/data/nccl_logs/nvlink_default.rank0.log"


def write_log(path: Path, num_bytes: int, kind: str, seed: int = 0) -> None:
    """A log of about ``num_bytes``: the real one, then many further lines of one kind."""
    chance = random.Random(seed)
    head = SOURCE.read_text()
    sizes = [2 * 7168 * tokens for tokens in range(1, 65)]
    written = len(head)
    with path.open("w") as file:
        file.write(head)
        second = 0
        while written < num_bytes:
            block = []
            for _ in range(4096):
                size = chance.choice(sizes)
                choice = f"AllReduce: {size} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..3}}"
                if kind == "mixed" and chance.random() < 0.5:
                    choice = (
                        f"AllReduce: opCount {second:x} sendbuff 0x7f00{size:08x} recvbuff "
                        f"0x7f01{size:08x} count {size // 2} datatype 9 op 0 root 0 comm 0x30467bc0"
                    )
                stamp = f"[2026-11-30 15:08:{second % 60:02d}] " if kind == "timestamps" else ""
                block.append(f"{stamp}vm:611:611 [0] NCCL INFO {choice}\n")
            second += 1
            text = "".join(block)
            file.write(text)
            written += len(text)


def measure(path: Path) -> None:
    """Parse in this process and print one JSON object."""
    from autotune.nccl_log import parse_nccl_logs

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu_start = time.perf_counter(), time.process_time()
    log = parse_nccl_logs([path])
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    choices = sum(choice.count for p in log.processes for choice in p.choices)
    print(
        json.dumps(
            {
                "mb": round(log.num_bytes / 1e6, 1),
                "lines": log.num_lines,
                "choices": choices,
                "seconds": round(seconds, 2),
                "cpu_s": round(cpu_s, 2),
                "max_rss_mb": round(peak / 1e3, 1),
                "rss_before_mb": round(before / 1e3, 1),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=100.0)
    parser.add_argument("--kind", choices=("choices", "timestamps", "mixed"), default="mixed")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nccl.log"
        write_log(path, int(options.mb * 1e6), options.kind)
        subprocess.run([sys.executable, __file__, "--measure", str(path)], check=True)


if __name__ == "__main__":
    main()
