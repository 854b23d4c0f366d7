"""What is timed on a host: memory, launches, copies, all-reduces. Each part stands alone.

A part that fails is a line in ``Timings.skipped`` with its reason: a host whose GPUs hang still
gets the rest of its machine file.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from autotune.backends.base import BackendFailure
from autotune.probe.spread import Sample

#: message sizes of decoding and of verifying, and the ends of the curve, bytes
SIZES_BYTES = (1024, 4096, 16384, 65536, 262144, 1048576, 4194304)
_REPEATS = 60
_READ_BYTES = 128 * 2**20
_READS = 12
_WORKER_TIMEOUT_S = 180.0
_BENCH_TIMEOUT_S = 60.0

Device = Literal["cpu", "cuda"]
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allreduce:
    """Timings of one message size."""

    backend: Literal["nccl", "gloo", "one_shot"]
    num_ranks: int
    size_bytes: int
    time: Sample
    env: Mapping[str, str]


@dataclass(slots=True)
class Timings:
    """Everything timed; None or empty where it was not."""

    #: GB/s (10^9 bytes) that all cores read together
    host_read: Sample | None = None
    launch_eager: Sample | None = None
    launch_graph: Sample | None = None
    allreduce: list[Allreduce] = field(default_factory=list)
    #: what the GPU worker told, one mapping per GPU
    gpus: list[dict[str, Any]] = field(default_factory=list)
    peers: list[tuple[int, int, bool]] = field(default_factory=list)
    nccl_version: str | None = None
    #: part -> why there is no number
    skipped: dict[str, str] = field(default_factory=dict)


class ProbeError(Exception):
    """One part of a probe gave nothing; the message says why."""


def host_read(num_threads: int, repeats: int = _READS, size_bytes: int = _READ_BYTES) -> Sample:
    """GB/s (10^9 bytes) at which ``num_threads`` threads read memory together."""
    blocks = [np.ones(size_bytes // 8) for _ in range(num_threads)]
    found = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(repeats + 1):
            start = time.perf_counter()
            # a maximum reads every byte once and lets go of the interpreter meanwhile
            list(pool.map(lambda block: float(block.max()), blocks))
            found.append(num_threads * size_bytes / (time.perf_counter() - start) / 1e9)
    return Sample.of(found[1:])


def run_worker(task: str) -> dict[str, Any]:
    """Run a task of ``worker.py``. Raises ``ProbeError`` with the reason."""
    command = [sys.executable, "-m", "autotune.probe.worker", task]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_WORKER_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {_WORKER_TIMEOUT_S:.0f} s: it hangs") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ProbeError(lines[-1].strip())
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def launches(device: Device, processes: int) -> tuple[Sample, Sample | None]:
    """us per op or kernel (one by one, and in a CUDA graph), over some processes."""
    eager: list[float] = []
    graph: list[float] = []
    for _ in range(processes):
        answer = run_worker("cpu-dispatch" if device == "cpu" else "gpu-launch")
        eager += answer["dispatch_us" if device == "cpu" else "eager_us"]
        graph += answer.get("graph_us", [])
    return Sample.of(eager), Sample.of(graph) if graph else None


def allreduce(
    device: Device,
    num_ranks: int,
    backend: Literal["nccl", "gloo", "one_shot"],
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    repeats: int = _REPEATS,
) -> tuple[list[Allreduce], str | None]:
    """All-reduce by size on the engine's own ranks, launched one by one; NCCL's version.

    Raises ``ProbeError`` when the ranks do not start, die or hang.
    """
    from autotune.backends.engine_backend import bench_allreduce

    env = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
    with tempfile.TemporaryDirectory(prefix="autotune-probe-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(_smallest_model(num_ranks)))
        config = {
            "target": {"shape": str(path), "weights": "random"},
            "tp": num_ranks,
            "device": device,
            # four bytes an element on a CPU, two on a GPU, as serving does
            "dtype": "float32" if device == "cpu" else "bfloat16",
            "collectives": {"backend": backend},
            "max_context": 16,
            "timeout_s": _BENCH_TIMEOUT_S,
            "environment": env,
        }
        try:
            times, version = bench_allreduce(config, sizes_bytes, repeats)
        except BackendFailure as error:
            raise ProbeError(f"{error.failure.kind}: {error.failure.message}") from error
    rows = [
        Allreduce(
            backend=backend,
            num_ranks=num_ranks,
            size_bytes=size,
            time=Sample.of(values),
            env=env if backend == "nccl" else {},
        )
        for size, values in times.items()
    ]
    return rows, version


def rank_counts(device: Device, num_gpus: int) -> list[int]:
    """Tensor-parallel sizes worth timing here: powers of two up to the GPUs, or the cores."""
    most = num_gpus if device == "cuda" else min(physical_cores(), 8)
    counts = [n for n in (2, 4, 8, 16) if n <= most]
    # two ranks on one core still meet
    return counts or ([2] if device == "cpu" else [])


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads counted once."""
    usable = len(os.sched_getaffinity(0))
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


def take(
    device: Device,
    num_gpus: int,
    report: Report,
    *,
    quick: bool = False,
) -> Timings:
    """Time everything; ``quick`` reads memory and one process's launches only."""
    found = Timings()

    def part(name: str, call: Callable[[], None]) -> None:
        report(name)
        try:
            call()
        except ProbeError as error:
            found.skipped[name] = str(error)

    def memory() -> None:
        threads = min(physical_cores(), 16)
        found.host_read = host_read(threads, repeats=4 if quick else _READS)

    def launch() -> None:
        found.launch_eager, found.launch_graph = launches(device, 1 if quick else 3)

    def rates() -> None:
        answer = run_worker("gpu-rates")
        found.gpus = answer["gpus"]
        found.peers = [(a, b, bool(ok)) for a, b, ok in answer["peers"]]

    part("memory", memory)
    if device == "cuda":
        part("GPU rates", rates)
    part("launches", launch)
    if quick:
        return found
    backends: tuple[Literal["nccl", "gloo", "one_shot"], ...]
    backends = ("nccl",) if device == "cuda" else ("gloo", "one_shot")
    for backend in backends:
        for num_ranks in rank_counts(device, num_gpus):

            def bench(
                backend: Literal["nccl", "gloo", "one_shot"] = backend, num_ranks: int = num_ranks
            ) -> None:
                rows, version = allreduce(device, num_ranks, backend)
                found.allreduce += rows
                found.nccl_version = found.nccl_version or version

            part(f"all-reduce {backend} x {num_ranks}", bench)
    return found


def num_parts(device: Device, num_gpus: int, *, quick: bool) -> int:
    """How many parts ``take`` reports."""
    if quick:
        return 2 + (device == "cuda")
    backends = 1 if device == "cuda" else 2
    return 2 + (device == "cuda") + backends * len(rank_counts(device, num_gpus))


def _smallest_model(num_ranks: int) -> dict[str, Any]:
    """A config.json that splits over ``num_ranks``: the ranks are what is wanted, not a model."""
    return {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "attention_bias": False,
        "hidden_size": 64,
        "head_dim": 32,
        "num_attention_heads": num_ranks,
        "num_key_value_heads": num_ranks,
        "num_hidden_layers": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
        "moe_intermediate_size": 16 * num_ranks,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "vocab_size": 64 * num_ranks,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "eos_token_id": 0,
    }
