"""Records what NCCL chooses on two GPUs, for many environments and sizes: cases for the selector.

usage: python bench/record_nccl_cases.py --out DIR [--library PATH ...] [--budget-s 160] [--jobs 3]
e.g.   python3 bench/record_nccl_cases.py --out $OUT --library .whl/libnccl-2.30.7.so.xz

Needs two NVIDIA GPUs and an installed NCCL (the nvidia-nccl wheel that torch brings), no torch.
Each environment gets two fresh processes (NCCL reads most variables once per process) that run one
all-reduce per size; the choices are NCCL's own log lines. ``--library`` adds further NCCL builds,
which may be archives of ``shrink_nccl.py`` (``*.so.xz``). NVLink multicast stays off throughout.
Writes ``nccl-cases.jsonl.gz``: a line per environment with version, environment, the telling lines
of both ranks' logs (repeats dropped) and the choices as [bytes, algo, proto, lo, hi].
"""

import argparse
import contextlib
import ctypes
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SHM = {"NCCL_P2P_DISABLE": "1"}
NUM_RANKS = 2
BFLOAT16, SUM = 9, 0
KIB, MIB = 1 << 10, 1 << 20

#: each is run on NVLink and, with NCCL_P2P_DISABLE=1, through host memory
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_PROTO": "LL"},
    {"NCCL_PROTO": "LL128"},
    {"NCCL_PROTO": "Simple"},
    {"NCCL_PROTO": "^LL"},
    {"NCCL_PROTO": "^Simple"},
    {"NCCL_PROTO": "LL,LL128,Simple"},
    {"NCCL_ALGO": "Ring"},
    {"NCCL_ALGO": "Tree"},
    {"NCCL_ALGO": "^ring", "NCCL_PROTO": "LL,Simple"},
    {"NCCL_ALGO": "allreduce:tree;broadcast:ring"},
    {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL128"},
    {"NCCL_PROTO": "^LL128;allreduce:LL128"},
    {"NCCL_MIN_NCHANNELS": "16"},
    {"NCCL_MIN_NCHANNELS": "7"},
    {"NCCL_MAX_NCHANNELS": "3"},
    {"NCCL_MAX_NCHANNELS": "1"},
    {"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "2"},
    {"NCCL_MAX_CTAS": "4", "NCCL_MIN_CTAS": "2"},
    {"NCCL_MIN_CTAS": "12"},
    {"NCCL_NTHREADS": "64"},
    {"NCCL_NTHREADS": "256"},
    {"NCCL_NTHREADS": "100"},
    {"NCCL_LL128_NTHREADS": "160", "NCCL_PROTO": "LL128"},
    {"NCCL_THREAD_THRESHOLDS": "16 16 128 64 32 256"},
    {"NCCL_BUFFSIZE": "1048576"},
    {"NCCL_BUFFSIZE": "16777216", "NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "NCCL_NTHREADS": "512"},
    {"NCCL_P2P_LEVEL": "PXB"},
    {"NCCL_P2P_LEVEL": "SYS"},
    {"NCCL_P2P_LEVEL": "LOC"},
    {"NCCL_P2P_LEVEL": "sys"},
    {"NCCL_SHM_DISABLE": "1"},
)
#: for further NCCL versions
FEWER = (0, 2, 4, 7, 8, 9, 13, 15, 17, 20)


def sizes() -> list[int]:
    """Bytes per all-reduce: powers of two, their neighbours, and decode sizes of 7168 x bf16."""
    found = {8 << i for i in range(24)}
    for power in (1 << i for i in range(12, 23)):
        found |= {power * 3 // 2, power - 16, power + 16}
    found |= {7168 * 2 * tokens for tokens in (1, 2, 3, 4, 8, 16, 32, 64)}
    return sorted(size for size in found if size <= 64 * MIB)


@dataclass(frozen=True, slots=True)
class Case:
    """One environment under one NCCL library."""

    library: Path
    env: dict[str, str]

    @property
    def label(self) -> str:
        settings = " ".join(f"{name[5:]}={value}" for name, value in self.env.items())
        return f"{self.library.parent.name}: {settings or 'default'}"


class UniqueId(ctypes.Structure):
    """ncclUniqueId: passed by value."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class CallError(RuntimeError):
    """A CUDA or NCCL call returned an error code."""


def check(code: int, what: str) -> None:
    if code != 0:
        raise CallError(f"{what} returned {code}")


def worker(rank: int, library: str, folder: Path) -> None:
    """One rank: an all-reduce per size. The id of the communicator goes through a file."""
    cuda = ctypes.CDLL("libcuda.so.1")
    nccl = ctypes.CDLL(library)
    nccl.ncclCommInitRank.argtypes = (
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int,
    )  # fmt: skip
    nccl.ncclAllReduce.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
        ctypes.c_void_p, ctypes.c_void_p,
    )  # fmt: skip
    nccl.ncclCommDestroy.argtypes = (ctypes.c_void_p,)
    device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    check(cuda.cuInit(0), "cuInit")
    check(cuda.cuDeviceGet(ctypes.byref(device), rank), "cuDeviceGet")
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    limit = int(os.environ["RECORD_LIMIT_BYTES"])
    check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(limit)), "cuMemAlloc")
    check(cuda.cuMemsetD8_v2(pointer, 0, ctypes.c_size_t(limit)), "cuMemsetD8")

    unique = UniqueId()
    shared = folder / "unique-id"
    if rank == 0:
        check(nccl.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
        partial = folder / "unique-id.part"
        partial.write_bytes(bytes(unique))
        partial.rename(shared)
    else:
        while not shared.exists():
            time.sleep(0.005)
        unique = UniqueId.from_buffer_copy(shared.read_bytes())
    comm = ctypes.c_void_p()
    check(nccl.ncclCommInitRank(ctypes.byref(comm), NUM_RANKS, unique, rank), "ncclCommInitRank")
    for size in sizes():
        if size <= limit:
            code = nccl.ncclAllReduce(
                pointer.value, pointer.value, size // 2, BFLOAT16, SUM, comm, None
            )
            check(code, f"ncclAllReduce of {size} bytes")
            check(cuda.cuCtxSynchronize(), "cuCtxSynchronize")
    check(nccl.ncclCommDestroy(comm), "ncclCommDestroy")


TELLING = re.compile(
    r"NCCL version|set by environment|Pattern \d|nNodes|Enabled NCCL|AllReduce \||Algorithm +\|"
    r"|Max NThreads|threadThresholds|coll channels| via |Bytes ->|WARN|=== System|=====|"
    r"- (?:DEV|GPU|NVS|PCI|NIC|NET)/|(?:CPU|PCI)/[0-9a-f]+-|Init (?:START|COMPLETE)|"
    r"Could not find a path|Invalid |User asked|NVLS|Comm config (?:min|max)CTAs|CTAS "
)
CHANNEL_ORDER = re.compile(r"NCCL INFO +\d+ : ")
CHOICE = re.compile(
    r"AllReduce: (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}"
)
TRANSPORT = re.compile(r"Channel \d+(?:/\d+)? : (.*)")


def telling_lines(text: str) -> list[str]:
    """The lines that say what NCCL read, found and chose; one line per kind of connection."""
    kept: list[str] = []
    seen: set[str] = set()
    for line in text.splitlines():
        matrix = line.startswith("  ") and " | " in line
        if not matrix and (not TELLING.search(line) or CHANNEL_ORDER.search(line)):
            continue
        if CHOICE.search(line):
            continue
        transport = TRANSPORT.search(line)
        if transport is not None:
            if transport[1] in seen:
                continue
            seen.add(transport[1])
        kept.append(line.rstrip())
    return kept


def run(case: Case, timeout_s: float) -> dict[str, object]:
    """Run one environment; a failure is a result too (``error``)."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = {name: v for name, v in os.environ.items() if not name.startswith("NCCL_")}
        network = case.env.get("NCCL_SHM_DISABLE") == "1"
        base |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,TUNING",
            # a program that uses NVLink multicast can take the host's GPUs out of service
            "NCCL_NVLS_ENABLE": "0",
            "RECORD_LIMIT_BYTES": str(4 * MIB if network else 64 * MIB),
        }
        ranks = []
        for rank in range(NUM_RANKS):
            env = base | case.env | {"NCCL_DEBUG_FILE": str(folder / f"rank{rank}.log")}
            command = [sys.executable, __file__, "--worker", str(rank)]
            command += ["--library", str(case.library), "--out", scratch]
            with (folder / f"rank{rank}.err").open("wb") as err:
                ranks.append(subprocess.Popen(command, env=env, stdout=err, stderr=err))
        error = wait(ranks, start + timeout_s)
        logs = []
        for rank in range(NUM_RANKS):
            path = folder / f"rank{rank}.log"
            logs.append(path.read_text(errors="replace") if path.exists() else "")
            if error is not None:
                err = (folder / f"rank{rank}.err").read_text(errors="replace").splitlines()
                error += f"; rank {rank}: {err[-1] if err else 'no output'}"
    version = re.search(r"NCCL version (\S+)", logs[0] + logs[1])
    return {
        "version": version[1] if version else None,
        "env": {"NCCL_NVLS_ENABLE": "0"} | case.env,
        "ranks": NUM_RANKS,
        "choices": [
            [int(size), algo, proto, int(low), int(high)]
            for size, algo, proto, low, high in CHOICE.findall(logs[0])
        ],
        "log_rank0": telling_lines(logs[0]),
        "log_rank1": [line for line in telling_lines(logs[1]) if " via " in line or "WARN" in line],
        "error": error,
        "seconds": round(time.monotonic() - start, 2),
    }


def wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Wait for all ranks; one that fails or stalls ends the others. Returns what went wrong."""
    error = None
    while any(rank.poll() is None for rank in ranks):
        failed = [i for i, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            error = f"rank {failed[0]} failed" if failed else "timed out"
            # the other rank may be about to report the same
            time.sleep(0.3)
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                rank.wait()
            break
        time.sleep(0.01)
    codes = [rank.wait() for rank in ranks]
    return error or (f"exit codes {codes}" if any(codes) else None)


def installed_library() -> Path:
    """libnccl.so.2 of the nvidia-nccl wheel of this Python."""
    for folder in sys.path:
        path = Path(folder) / "nvidia/nccl/lib/libnccl.so.2"
        if path.exists():
            return path
    raise FileNotFoundError("no nvidia/nccl/lib/libnccl.so.2 on sys.path; give --library PATH")


def cases(main_library: Path, others: list[Path]) -> Iterator[Case]:
    """A part of the environments for every library, then the rest for the first; on both links."""
    rest = [index for index in range(len(ENVIRONMENTS)) if index not in FEWER]
    for index, libraries in [(i, [main_library, *others]) for i in FEWER] + [
        (i, [main_library]) for i in rest
    ]:
        for library in libraries:
            yield Case(library, ENVIRONMENTS[index])
            yield Case(library, SHM | ENVIRONMENTS[index])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--library", type=Path, action="append", default=[])
    parser.add_argument("--skip-installed", action="store_true")
    parser.add_argument("--jobs", type=int, default=3, help="environments at a time")
    parser.add_argument("--budget-s", type=float, default=160.0, help="start no more after this")
    parser.add_argument("--timeout-s", type=float, default=40.0, help="of one environment")
    parser.add_argument("--limit", type=int, help="only the first N environments")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker, str(options.library[0]), options.out)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="nccl-libraries-"))
    libraries = [] if options.skip_installed else [installed_library()]
    for path in options.library:
        if path.suffix == ".xz":
            from shrink_nccl import unpack

            path = unpack(path, scratch)
        libraries.append(path)
    todo = list(cases(libraries[0], libraries[1:]))[: options.limit]
    start = time.monotonic()

    def one(case: Case) -> dict[str, object] | None:
        if time.monotonic() - start > options.budget_s:
            return None
        result = run(case, options.timeout_s)
        if result["error"] is not None and not result["log_rank0"]:
            result = run(case, options.timeout_s)
        tail = f" ERROR {result['error']}" if result["error"] else ""
        print(f"{case.label}: {len(result['choices'])} choices{tail}", flush=True)  # type: ignore[arg-type]
        return result

    path = options.out / "nccl-cases.jsonl.gz"
    num_cases = num_failed = 0
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
        # mtime 0: the same cases give the same file
        file = stack.enter_context(gzip.GzipFile(path, "wb", mtime=0))
        for result in pool.map(one, todo):
            if result is not None:
                num_failed += result["error"] is not None
                num_cases += len(result["choices"])  # type: ignore[arg-type]
                file.write((json.dumps(result, sort_keys=True) + "\n").encode())
    print(
        f"{path}: {num_cases} cases in {time.monotonic() - start:.0f} s, "
        f"{num_failed} environments failed"
    )


if __name__ == "__main__":
    main()
