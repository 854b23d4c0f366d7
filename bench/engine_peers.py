"""Peers of ``bench/engine.py``, measured in the same run: transformers, and vLLM where it is there.

vLLM comes as a bundle of compressed libraries (``.whl/``: a site folder and three extension
modules), is unpacked once into a scratch folder, and runs in processes of its own whose packages
are only its. Without the bundle its stages say so and end well.
"""

import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUNDLE = ROOT / ".whl"
SCRATCH = Path(os.environ.get("VLLM_SCRATCH", Path.home() / ".cache" / "vllm-peer"))
#: where each extension module of the bundle belongs
MODULES = {
    "_C_stable_libtorch.abi3.so": "vllm",
    "_moe_C_stable_libtorch.abi3.so": "vllm",
    "_vllm_fa3_C.abi3.so": "vllm/vllm_flash_attn",
}

Emit = Callable[..., None]


def unpack() -> list[str]:
    """Unpack what of the bundle is here and not unpacked yet; returns what is still missing.

    The bundle may arrive in parts, over several calls on the same machine.
    """
    site, missing = SCRATCH / "site", []
    marks = SCRATCH / "unpacked"
    for path in (site, marks):
        path.mkdir(parents=True, exist_ok=True)
    for name in ("site.tar", *MODULES):
        packed = BUNDLE / f"{name}.xz"
        if (marks / name).exists():
            continue
        if not packed.is_file():
            missing.append(packed.name)
            continue
        with lzma.open(packed) as source:
            if name == "site.tar":
                with tarfile.open(fileobj=source, mode="r|") as archive:
                    archive.extractall(site, filter="tar")
            else:
                goal = site / MODULES[name] / name
                goal.parent.mkdir(parents=True, exist_ok=True)
                with goal.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
        (marks / name).touch()
    return missing


def vllm_rows(emit: Emit, name: str, limit_s: float, *arguments: str) -> None:
    """Run ``bench/vllm_peer.py`` and pass its rows on."""
    if missing := unpack():
        emit(row="vllm", name=name, error=f"left out: {', '.join(missing)} not in {BUNDLE.name}/")
        return
    rows, log = SCRATCH / f"{os.getpid()}.jsonl", SCRATCH / f"{os.getpid()}.log"
    environment = os.environ | {
        "PYTHONPATH": str(SCRATCH / "site"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CACHE_ROOT": str(SCRATCH / "cache"),
    }
    # -P: this folder has a kernels.py, a name that transformers looks for
    command = [sys.executable, "-P", str(ROOT / "bench" / "vllm_peer.py"), "--out", str(rows)]
    command += ["--folder", str(SCRATCH / "models"), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=SCRATCH,
        )
        seen, deadline_s = 0, time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.5)
            seen = _pass_on(emit, name, rows, seen)
        ended = process.poll() is not None
        if not ended:
            process.terminate()
            process.wait()
    _pass_on(emit, name, rows, seen)
    if process.returncode:
        how = f"exit code {process.returncode}" if ended else f"stopped after {limit_s:.0f} s"
        emit(row="vllm", name=name, error=how, log=log.read_text(errors="replace")[-3000:])
        raise SystemExit(1)


def _pass_on(emit: Emit, name: str, rows: Path, seen: int) -> int:
    """Emit the rows after the first ``seen``; returns how many there are."""
    if not rows.exists():
        return seen
    lines = rows.read_text().splitlines()
    for line in lines[seen:]:
        values: dict[str, Any] = json.loads(line)
        emit(**({"name": name} | values))
    return len(lines)


def stage_unpack(emit: Emit) -> None:
    """Unpack the bundle, before anything is timed."""
    start_s = time.perf_counter()
    missing = unpack()
    emit(row="unpack", name="vLLM's bundle", start_s=time.perf_counter() - start_s, missing=missing)


def stage_vllm8(emit: Emit) -> None:
    """vLLM on the slice: wall at four sizes, GPU time at two."""
    vllm_rows(emit, "vLLM, 8 layers", 145, "--busy", "1", "4", "16", "64")


def stage_vllm48(emit: Emit) -> None:
    """vLLM on the whole model."""
    vllm_rows(emit, "vLLM, 48 layers", 145, "--layers", "48", "--batches", "1", "4", "--busy", "1")


def stage_vllm48eagle(emit: Emit) -> None:
    """vLLM's EAGLE-3 cycle on the whole model."""
    vllm_rows(
        emit, "vLLM, 48 layers, k=3", 160, "--layers", "48", "--batches", "1", "--eagle",
        "--busy", "1",
    )  # fmt: skip


def stage_peer8(emit: Emit) -> None:
    """transformers on the same slice, eager and captured."""
    from bench.transformers_peer import peer_rows

    peer_rows(emit, 8, (1, 4, 16, 64))
