"""Which machine this is: a fingerprint that a launch file carries, so that both sides agree."""

import hashlib
import os
from pathlib import Path

_NVIDIA_PCI_VENDOR = "0x10de"
#: PCI class prefixes of a GPU: VGA controller, 3D controller
_GPU_CLASSES = ("0x0300", "0x0302")


def cpu_model() -> str:
    """The processor's name as the kernel gives it, "unknown" where it gives none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown"
    for line in text.splitlines():
        if line.startswith(("model name", "Model", "CPU part")):
            return line.partition(":")[2].strip()
    return "unknown"


def gpu_names() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs by PCI address, read from the driver's /proc files (no CUDA)."""
    names = []
    for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in info.read_text().splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    return tuple(names)


def gpu_links() -> tuple[str, ...]:
    """Maximum PCIe speed and width of each NVIDIA GPU, from sysfs ("32.0 GT/s PCIe x16")."""
    links = []
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        if _read(device / "vendor") != _NVIDIA_PCI_VENDOR:
            continue
        if not _read(device / "class").startswith(_GPU_CLASSES):
            continue
        links.append(f"{_read(device / 'max_link_speed')} x{_read(device / 'max_link_width')}")
    return tuple(links)


def machine_fingerprint() -> str:
    """12 hex digits of the hash of CPU model, core count, GPU names and their PCIe links.

    Nothing that changes with a reboot, a driver or a load goes in.
    """
    facts = (cpu_model(), str(os.cpu_count()), *gpu_names(), *gpu_links())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"
