"""Collects what tells whether two measurements are comparable (design.md, Trust 6).

Whatever cannot be read is None or empty, and ``unknown`` says why by field name.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from autotune.health import GpuState, RunCommand, query_gpus, run_command, snapshot
from autotune.records import Provenance, RankEnvironment

#: distributions whose version can change a number; nvidia-* wheels are added when installed
_PACKAGES = (
    "autotune-moe",
    "torch",
    "triton",
    "numpy",
    "scipy",
    "simpy",
    "optuna",
    "sqlalchemy",
    "safetensors",
    "tokenizers",
    "transformers",
    "sglang",
    "vllm",
    "flashinfer-python",
)
_SOURCES = ("autotune", "engine", "kernels", "model")

#: prefixes of variables that can change how a worker runs; all others stay out of the record
_RUN_PREFIXES = (
    "ATEN_", "AUTOTUNE_", "CUBLAS", "CUDA", "FLASHINFER_", "GLOO_", "GOMP_", "HF_HUB_OFFLINE",
    "KMP_", "LANG", "LC_", "LD_", "LOCAL_RANK", "MALLOC_", "MASTER_", "MKL_", "NCCL_", "NVIDIA_",
    "NVSHMEM_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "RANK", "SGLANG_", "SGL_", "TORCH",
    "TRITON_", "VLLM_", "WORLD_SIZE",
)  # fmt: skip
_SECRET_WORDS = ("TOKEN", "SECRET", "PASSW", "CREDENTIAL", "_KEY", "_AUTH")


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables worth recording: what can change a run, and nothing that may be a secret."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_RUN_PREFIXES)
        and not any(word in name.upper() for word in _SECRET_WORDS)
    }


def collect_provenance(
    config: Mapping[str, object],
    *,
    device: str,
    ranks: Sequence[RankEnvironment] = (),
    machine_fingerprint: str = "",
    nccl: Mapping[str, object] | None = None,
    unknown: Mapping[str, str] | None = None,
    run: RunCommand = run_command,
) -> Provenance:
    """Everything known now about the code, the host and the resolved ``config``.

    ``config`` must be plain JSON values. ``device`` is "cuda", "cpu" or "none" (nothing real runs:
    a simulation or a replay); ``unknown`` gives the caller's reasons for what it left out.
    """
    reasons = dict(unknown or {})
    if not ranks:
        reasons.setdefault("ranks", "no worker is running")
    if not nccl:
        reasons.setdefault("nccl", "NCCL carries nothing here, or logged nothing")
    if not machine_fingerprint:
        reasons.setdefault("machine_fingerprint", "the study names no machine")
    commit, dirty, why = git_state()
    if why is not None:
        reasons |= {"commit": why, "dirty": why}
    gpus = (query_gpus(run) or ()) if device == "cuda" else ()
    if not gpus:
        why_no_gpu = (
            "nvidia-smi is absent or fails" if device == "cuda" else f"device is {device}, not cuda"
        )
        reasons |= dict.fromkeys(("driver", "gpus", "pcie"), why_no_gpu)
    topology = run(("nvidia-smi", "topo", "-m")) if gpus else None
    if topology is None:
        reasons.setdefault("topology", "nvidia-smi topo -m gave nothing")
    return Provenance(
        config=dict(config),
        config_hash=config_hash(config),
        ranks=tuple(ranks),
        commit=commit,
        dirty=dirty,
        packages=package_versions(),
        python=platform.python_version(),
        driver=gpus[0].driver if gpus else None,
        gpus=tuple(_gpu_text(gpu) for gpu in gpus),
        pcie=tuple(_pcie_text(gpu) for gpu in gpus),
        cpu=cpu_model(),
        cpu_affinity=tuple(sorted(os.sched_getaffinity(0))),
        topology=topology,
        machine_fingerprint=machine_fingerprint,
        nccl=dict(nccl or {}),
        health=() if device == "none" else snapshot(device, run),
        unknown=reasons,
    )


def config_hash(config: Mapping[str, object]) -> str:
    """16 hex digits of the hash of ``config``; equal for equal values in any order of keys.

    Raises ``TypeError`` when a value is not JSON.
    """
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Versions of the installed distributions that can change a number."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in _PACKAGES or name.startswith("nvidia-"):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def git_state(root: Path | None = None) -> tuple[str | None, bool | None, str | None]:
    """(commit, dirty, why unknown) of the running code.

    ``root`` is the folder that holds our packages. Untracked files count as dirty only inside
    them: a database beside the code changes nothing.
    """
    root = root or Path(__file__).resolve().parents[1]
    # an installed copy inside somebody else's checkout must not report that checkout's commit
    if _git(root, "ls-files", "--error-unmatch", "autotune/provenance.py") is None:
        return None, None, "the code does not run from a git checkout"
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", *_SOURCES)
    if commit is None or changes is None:
        return None, None, "git rev-parse or git status failed"
    return commit.strip(), bool(changes.strip()), None


def cpu_model() -> str:
    """Model name and number of logical CPUs, from /proc/cpuinfo where there is one."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} ({os.cpu_count()} logical CPUs)"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ("git", "-C", str(root), *arguments),
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            # status must not take the index lock of somebody who is committing
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _gpu_text(gpu: GpuState) -> str:
    memory = "memory unknown" if gpu.memory_mib is None else f"{gpu.memory_mib:.0f} MiB"
    # the clock of the moment is in the health: here it would make equal hosts differ
    clock = f"SM up to {_or_unknown(gpu.max_sm_clock_mhz)} MHz"
    return f"{gpu.name}, {memory}, {clock}, power limit {_or_unknown(gpu.power_limit_w)} W"


def _pcie_text(gpu: GpuState) -> str:
    now = f"gen {_or_unknown(gpu.pcie_gen)} x{_or_unknown(gpu.pcie_width)}"
    return f"{now} (max gen {_or_unknown(gpu.pcie_gen_max)} x{_or_unknown(gpu.pcie_width_max)})"


def _or_unknown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"
