"""Warm-up stages of ``bench/engine.py``: every kernel of a stage compiled before it is timed.

Triton compiles at a kernel's first use, one after the other in a process; here processes share the
work and leave the results in Triton's cache on disk.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.engine_near_tie import AT_ONCE, KINDS
from bench.engine_tiny import TINY_KINDS
from bench.engine_tp import THROUGH_HOST

Emit = Callable[..., None]
_ROOT = Path(__file__).resolve().parent.parent
_HEAD = f"import sys; sys.path.insert(0, {str(_ROOT)!r})\nfrom engine.api import Engine\n"
_SLICE = (
    "import bench.engine_rows as r\n"
    "with Engine(r.config(2, 64, draft={{'weights': 'random'}}, **{changes})) as e:\n"
    "    e.generate(r.requests({batch}, 6, 1), r.{spec}, concurrency={batch})\n"
)
_TINY = (
    "import bench.engine_tiny as t, bench.engine_near_tie as n\n"
    "spec = (t.TINY_KINDS | n.KINDS)[{kind!r}]\n"
    "asks = t.tiny_requests(16, 128, 24)\n"
    "with Engine(t.tiny_config(dtype={dtype!r}, cuda_graph=n.GRAPHS, **{changes})) as e:\n"
    "    for size in {sizes}: e.generate(asks[:size], spec, concurrency=size)\n"
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
    _compile(emit, _slices())


def stage_warm_all(emit: Emit) -> None:
    """The slices', the whole model's, ``half``'s and ``near_tie``'s, at once."""
    _compile(emit, _slices() | _near_ties() | _halves())


def stage_warm_tiny(emit: Emit) -> None:
    """What the trained tiny model's stages of speed run: bf16 at three loads."""
    _compile(emit, {f"tiny {kind}": _tiny(kind, "bfloat16", (1, 4, 16)) for kind in TINY_KINDS})


def stage_warm_near_tie(emit: Emit) -> None:
    """What the stage ``near_tie`` runs: both types at one load."""
    _compile(emit, _near_ties())


def stage_warm_tp2(emit: Emit) -> None:
    """What the stages ``tp2`` and ``tp2spec`` run: half of every sharded weight."""
    slices = _slices((1, 4, 16), THROUGH_HOST)
    tiny = {
        f"tiny {kind}, 2 GPUs": _tiny(kind, "bfloat16", (1, 4, 16), THROUGH_HOST)
        for kind in TINY_KINDS
    }
    _compile(emit, slices | tiny)


#: seconds for ``compile_all``; what does not fit is left out and said
COMPILE_BUDGET_S = 45


def stage_compile_all(emit: Emit) -> None:
    """Every kernel's defaults, then tuning's candidates, for all architectures: idle cores only."""
    start_s = time.perf_counter()
    done = subprocess.run(
        ["nice", "-n", "19", sys.executable, "-m", "kernels.compile_all",
         "--budget", str(COMPILE_BUDGET_S)],
        capture_output=True, text=True, cwd=_ROOT, check=False,
    )  # fmt: skip
    emit(
        row="compile",
        name="kernels.compile_all",
        rc=done.returncode,
        seconds=time.perf_counter() - start_s,
        lines=done.stdout.splitlines(),
        tail=done.stderr[-1500:],
    )


def _slices(
    batches: tuple[int, ...] = (1, 4, 16, 64), changes: Mapping[str, Any] | None = None
) -> dict[str, str]:
    sizes = [*((b, "OFF") for b in batches), (1, "K3"), (4, "K3")]
    return {
        f"{b} {spec}": _SLICE.format(batch=b, spec=spec, changes=dict(changes or {}))
        for b, spec in sizes
    }


def _halves() -> dict[str, str]:
    return {
        f"{batch} half": f"from bench.engine_half import run_once\nrun_once({batch}, 6)\n"
        for batch in (1, 4, 16)
    }


def _near_ties() -> dict[str, str]:
    return {
        f"{dtype} {kind}": _tiny(kind, dtype, (AT_ONCE,))
        for dtype in ("bfloat16", "float32")
        for kind in ("off", *KINDS)
    }


def _tiny(
    kind: str, dtype: str, sizes: tuple[int, ...], changes: Mapping[str, Any] | None = None
) -> str:
    return _TINY.format(kind=kind, dtype=dtype, sizes=sizes, changes=dict(changes or {}))
