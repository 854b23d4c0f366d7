"""The machine of a study: its file, or this host."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from autotune.errors import UserError
from autotune.schemas import Study
from model.machine import Machine, load_machine
from model.shapes import ModelShape

_COPY_BYTES = 64 * 2**20
_COPIES = 5


def rank_problem(study: Study, machine: Machine, target: ModelShape) -> Callable[[int], str | None]:
    """Why a tensor-parallel size does not suit this host or target, or None.

    Ranks share a GPU only where the engine's ``devices`` say so (for tests).
    """
    shares = study.backend.args.get("devices") is not None

    def problem(tp: int) -> str | None:
        if 0 < machine.num_gpus < tp and not shares:
            return f"parallel.tp {tp} is more than the {machine.num_gpus} GPUs of {machine.name}"
        return target.head_problem(tp)

    return problem


def study_machine(study: Study) -> Machine:
    """The machine file that a study names, or this host for ``auto``.

    Raises ``UserError`` for a file that can't be used, or a GPU host that has to be probed first.
    """
    if study.machine != "auto":
        try:
            return load_machine(study.machine)
        except ValueError as error:
            raise UserError(f"machine: {error}") from None
    # a machine file needs no probe and no doctor
    from autotune.probe.run import choose_device, has_nvidia_gpu, quick_machine

    if study.backend.kind != "engine" and not has_nvidia_gpu():
        # nothing is launched here, so that how fast torch launches does not matter
        return cpu_machine()
    wanted = study.backend.args.get("device", "auto")
    device, num_gpus = choose_device(
        wanted if wanted in ("cpu", "cuda") else "auto",
        key="backend.args.device: cuda",
        cpu="backend.args.device: cpu",
    )
    return quick_machine(device, num_gpus)


def check_host(study: Study, machine: Machine) -> None:
    """Refuse to measure here with the description of another host.

    Predictions would be for that host and measurements of this one. A description that no probe
    made (``host_fingerprint`` null) is taken at its word. Raises ``UserError``.
    """
    if study.backend.kind != "engine" or machine.host_fingerprint is None:
        return
    from autotune.backends.engine_backend import host_fingerprint

    here = host_fingerprint()
    if machine.host_fingerprint != here:
        raise UserError(
            f"machine: {machine.name} was probed on host {machine.host_fingerprint}, this is host "
            f"{here}, and backend engine measures here; use machine: auto or a file that `autotune "
            f"probe` wrote here, in a study of another name if this one has measurements"
        )


def cpu_machine() -> Machine:
    """This host without its GPUs: sockets, cores, and the memory rate that a copy reaches."""
    import psutil

    sockets = _num_sockets()
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    rate = round(copy_gb_per_s(), 2)
    nodes = [
        node
        for index in range(sockets)
        for node in (
            {"id": f"socket{index}", "kind": "socket"},
            {"id": f"memory{index}", "kind": "host_memory"},
        )
    ]
    links = [
        {
            "a": f"socket{index}",
            "b": f"memory{index}",
            "kind": "memory",
            "gb_per_s": rate,
            "latency_us": 0.1,
        }
        for index in range(sockets)
    ]
    links += [
        {
            "a": "socket0",
            "b": f"socket{index}",
            "kind": "socket",
            "gb_per_s": rate,
            "latency_us": 0.2,
        }
        for index in range(1, sockets)
    ]
    values = {
        "name": "this-host-cpu",
        "gpu": None,
        "cpu": {
            "vendor": _vendor(),
            "model": _cpu_field("model name") or "unknown",
            "sockets": sockets,
            "cores_per_socket": max(1, cores // sockets),
        },
        "topology": {"nodes": nodes, "links": links},
        "p2p": {"possible": False},
        "software": {"nccl_version": None},
        "sources": {
            "cpu": "/proc/cpuinfo and psutil on this host",
            "topology": f"one memory per socket; rate: best of {_COPIES} copies of 64 MiB by numpy",
            "p2p": "no GPU is used",
            "software": "no NCCL: gloo carries the all-reduce",
        },
        "measured": {"dram_gb_per_s": rate},
    }
    return Machine.from_dict(values, where="this host")


def copy_gb_per_s() -> float:
    """GB/s (10^9 bytes, read + written) of the best of a few 64 MiB copies on one core."""
    source = np.ones(_COPY_BYTES // 8)
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(_COPIES):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return 2 * _COPY_BYTES / best / 1e9


def _num_sockets() -> int:
    ids = set()
    for file in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id"):
        try:
            ids.add(file.read_text().strip())
        except OSError:
            continue
    return max(1, len(ids))


def _vendor() -> str:
    text = (_cpu_field("vendor_id") or "").lower()
    return "intel" if "intel" in text else "amd" if "amd" in text else "other"


def _cpu_field(name: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
