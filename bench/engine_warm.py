"""Warm-up stages of ``bench/engine.py``: every kernel of a stage compiled before it is timed.

Triton compiles at a kernel's first use, one after the other in a process; here processes share the
work and leave the results in Triton's cache on disk.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.engine_near_tie import KINDS
from bench.engine_tiny import TINY_KINDS

Emit = Callable[..., None]
_ROOT = Path(__file__).resolve().parent.parent
_HEAD = f"import sys; sys.path.insert(0, {str(_ROOT)!r})\nfrom engine.api import Engine\n"
_SLICE = (
    "import bench.engine_rows as r\n"
    "with Engine(r.config(4, 64, draft={{'weights': 'random'}})) as e:\n"
    "    e.generate(r.requests({batch}, 6, 1), r.{spec}, concurrency={batch})\n"
)
_TINY = (
    "import bench.engine_tiny as t, bench.engine_near_tie as n\n"
    "spec = (t.TINY_KINDS | n.KINDS)[{kind!r}]\n"
    "asks = t.tiny_requests(16, 128, 40)\n"
    "with Engine(t.tiny_config(dtype={dtype!r}, cuda_graph=n.GRAPHS)) as e:\n"
    "    for size in (1, 4, 16): e.generate(asks[:size], spec, concurrency=size)\n"
    "    if {kind!r} == 'off': e.generate(asks, spec, concurrency=16, margins=True)\n"
)


def _compile(emit: Emit, jobs: Mapping[str, str]) -> None:
    start_s = time.perf_counter()
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", _HEAD + text],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, text in jobs.items()
    }
    for name, process in processes.items():
        tail = process.communicate()[0][-1500:]
        took_s = time.perf_counter() - start_s
        emit(row="warm", name=f"warm {name}", rc=process.returncode, start_s=took_s, tail=tail)


def stage_warm(emit: Emit) -> None:
    """The slices' kernels at every size, and the EAGLE-3 cycle's."""
    sizes = [(1, "OFF"), (4, "OFF"), (16, "OFF"), (64, "OFF"), (1, "K3"), (4, "K3")]
    _compile(emit, {f"{b} {spec}": _SLICE.format(batch=b, spec=spec) for b, spec in sizes})


def stage_warm_tiny(emit: Emit) -> None:
    """The trained tiny model's, in both types."""
    kinds = [*TINY_KINDS, *(k for k in KINDS if k not in TINY_KINDS)]
    jobs = {
        f"tiny {dtype} {kind}": _TINY.format(kind=kind, dtype=dtype)
        for dtype in ("bfloat16", "float32")
        for kind in (kinds if dtype == "bfloat16" else ["off", *KINDS])
    }
    _compile(emit, jobs)
