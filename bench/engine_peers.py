"""Peers of ``bench/engine.py``, measured in the same run: transformers, and vLLM where it is there.

vLLM comes as a bundle of compressed libraries (``.whl/``: a site folder and three extension
modules), is unpacked once into a scratch folder, and runs in processes of its own whose packages
are only its. Without the bundle its stages say so and end well.
"""

import contextlib
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Vllm:
    """One vLLM engine to measure: the name of its rows and ``bench/vllm_peer.py``'s arguments."""

    name: str
    arguments: tuple[str, ...]

    @property
    def at(self) -> Path:
        """Its files' common path, without a suffix."""
        return SCRATCH / "run" / self.name.replace(", ", "-").replace(" ", "-").replace("=", "")

    def file(self, suffix: str) -> Path:
        """One of its files: pid, jsonl, log, ready, go."""
        return self.at.with_suffix(f".{suffix}")


EIGHT = Vllm("vLLM, 8 layers", ("--busy", "1", "4", "16", "64"))
WHOLE = Vllm("vLLM, 48 layers", ("--layers", "48", "--batches", "1", "4", "--busy", "1", "4"))
EAGLE = Vllm("vLLM, 48 layers, k=3", ("--layers", "48", "--batches", "1", "--eagle", "--busy", "1"))


def start_vllm(emit: Emit, peer: Vllm) -> bool:
    """Start an engine that warms up and then holds; False where the bundle is not whole."""
    if missing := unpack():
        text = f"left out: {', '.join(missing)} not in {BUNDLE.name}/"
        emit(row="vllm", name=peer.name, error=text)
        return False
    peer.at.parent.mkdir(parents=True, exist_ok=True)
    for suffix in ("jsonl", "ready", "go"):
        peer.file(suffix).unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": str(SCRATCH / "site"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CACHE_ROOT": str(SCRATCH / "cache"),
    }
    # -P: this folder has a kernels.py, a name that transformers looks for
    command = [sys.executable, "-P", str(ROOT / "bench" / "vllm_peer.py"), *peer.arguments]
    command += ["--out", str(peer.file("jsonl")), "--hold", str(peer.at)]
    command += ["--folder", str(SCRATCH / "models")]
    with peer.file("log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=SCRATCH,
            # a group of its own outlives this stage; ``stop_vllm`` ends it
            start_new_session=True,
        )
    peer.file("pid").write_text(str(process.pid))
    return True


def is_running(peer: Vllm) -> bool:
    """Whether its process is there (a stage's own child that has ended is collected)."""
    try:
        pid = int(peer.file("pid").read_text())
        os.waitpid(pid, os.WNOHANG)
    except (OSError, ValueError):
        pass
    try:
        state = Path(f"/proc/{peer.file('pid').read_text()}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] not in ("Z", "X")


def stop_vllm() -> None:
    """End every engine that a stage left behind."""
    for peer in (EIGHT, WHOLE, EAGLE):
        with contextlib.suppress(OSError, ValueError):
            pid = int(peer.file("pid").read_text())
            peer.file("pid").unlink()
            os.killpg(pid, signal.SIGKILL)


def wait_for(peer: Vllm, suffix: str, limit_s: float) -> bool:
    """Until the file is there; False when its process ended or time ran out."""
    deadline_s = time.monotonic() + limit_s
    while not peer.file(suffix).exists():
        if not is_running(peer) or time.monotonic() > deadline_s:
            return False
        time.sleep(0.2)
    return True


def vllm_rows(emit: Emit, peer: Vllm, limit_s: float) -> None:
    """Let the engine measure (start it first where nobody has) and pass its rows on."""
    deadline_s = time.monotonic() + limit_s
    if not peer.file("pid").exists() and not start_vllm(emit, peer):
        return
    if wait_for(peer, "ready", limit_s):
        peer.file("go").touch()
    rows, seen = peer.file("jsonl"), 0
    while is_running(peer) and time.monotonic() < deadline_s:
        time.sleep(0.3)
        seen = _pass_on(emit, peer.name, rows, seen)
    ended = not is_running(peer)
    seen = _pass_on(emit, peer.name, rows, seen)
    # the first row tells of the start
    measured = seen > 1
    with contextlib.suppress(OSError, ValueError):
        os.killpg(int(peer.file("pid").read_text()), signal.SIGKILL)
    peer.file("pid").unlink(missing_ok=True)
    if not ended or not measured:
        how = "ended without a measurement" if ended else f"stopped after {limit_s:.0f} s"
        tail = peer.file("log").read_text(errors="replace")[-3000:]
        emit(row="vllm", name=peer.name, error=how, log=tail)
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


def stage_vllm_start(emit: Emit) -> None:
    """Start vLLM on the slice and on the whole model; they warm up beside what follows."""
    for peer in (EIGHT, WHOLE):
        start_vllm(emit, peer)


def stage_vllm_eagle_start(emit: Emit) -> None:
    """Start vLLM's EAGLE-3 engine, once the others' memory is free; nothing is timed beside it."""
    start_vllm(emit, EAGLE)


def stage_vllm_wait(emit: Emit) -> None:
    """Until both hold still: nothing is timed beside a start."""
    for peer in (EIGHT, WHOLE):
        start_s = time.perf_counter()
        ready = wait_for(peer, "ready", 150)
        emit(
            row="vllm ready" if ready else "vllm",
            name=peer.name,
            start_s=time.perf_counter() - start_s,
            error=None if ready else "not ready",
        )


def stage_vllm8(emit: Emit) -> None:
    """vLLM on the slice: wall and GPU time at four sizes."""
    vllm_rows(emit, EIGHT, 150)


def stage_vllm48(emit: Emit) -> None:
    """vLLM on the whole model."""
    vllm_rows(emit, WHOLE, 150)


def stage_vllm48eagle(emit: Emit) -> None:
    """vLLM's EAGLE-3 cycle on the whole model."""
    vllm_rows(emit, EAGLE, 165)


def stage_peer8(emit: Emit) -> None:
    """transformers on the same slice, eager and captured."""
    from bench.transformers_peer import peer_rows

    peer_rows(emit, 8, (1, 4, 16, 64))
