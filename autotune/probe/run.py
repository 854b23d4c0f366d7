"""The probe: time this host, build its machine."""

from collections.abc import Callable
from pathlib import Path

from autotune.errors import UserError
from autotune.probe.build import build_machine
from autotune.probe.timings import Device, Timings, take
from model.machine import Machine

#: where a driver shows its GPUs
_GPU_FILES = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"))


def choose_device(
    wanted: str, *, key: str = "--device cuda", cpu: str = "--device cpu"
) -> tuple[Device, int]:
    """(device, number of GPUs) for "auto", "cpu" or "cuda".

    ``key`` and ``cpu`` name where the user chose the device, and how to choose the CPU there.
    Raises ``UserError`` when GPUs are asked for, or are in this host, and torch sees none.
    """
    from autotune.backends.engine_args import visible_gpus

    if wanted == "cpu" or (wanted == "auto" and not has_nvidia_gpu()):
        return "cpu", 0
    count = visible_gpus()
    if count:
        return "cuda", count
    if wanted == "cuda":
        raise UserError(
            f"{key}: torch sees no GPU here; `autotune doctor` says why, {cpu} does without GPUs"
        )
    if has_nvidia_gpu():
        raise UserError(
            "this host has an NVIDIA GPU that torch cannot use; `autotune doctor` says why, "
            f"{cpu} does without GPUs"
        )
    return "cpu", 0


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver has a GPU; containers may show its device files only."""
    return any(path for folder, name in _GPU_FILES for path in Path(folder).glob(name))


def probe_machine(
    device: Device,
    num_gpus: int,
    report: Callable[[str], None] = lambda part: None,
    *,
    quick: bool = False,
    name: str | None = None,
) -> tuple[Machine, Timings]:
    """Time this host and describe it. ``report`` hears the name of each part before it starts."""
    # imported here: it brings torch, which reading a machine file does without
    from autotune.backends.engine_backend import host_fingerprint

    timings = take(device, num_gpus, report, quick=quick)
    machine = build_machine(timings, device, name, host_fingerprint=host_fingerprint())
    return machine, timings


def quick_machine(device: Device = "cpu", num_gpus: int = 0) -> Machine:
    """This host in seconds: memory and launches only, for ``machine: auto``."""
    return probe_machine(device, num_gpus, quick=True)[0]
