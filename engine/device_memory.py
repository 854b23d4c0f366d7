"""Memory in use on a GPU as the driver counts it (NVML), read without a CUDA context.

``cudaMemGetInfo`` needs a context, which takes hundreds of MiB itself: what was in use before one
existed is seen only here.
"""

import ctypes
from functools import cache

_LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@cache
def _library(name: str) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def used_bytes(pci_address: str, library_name: str | None = None) -> int | None:
    """Bytes in use by all processes on the GPU at ``pci_address`` (dddd:bb:dd.f).

    None where the driver's library is absent or does not tell.
    """
    library = _library(library_name or _LIBRARY)
    if library is None:
        return None
    device, memory = ctypes.c_void_p(), _Memory()
    found = library.nvmlDeviceGetHandleByPciBusId_v2(pci_address.encode(), ctypes.byref(device))
    if found != 0 or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
        return None
    return int(memory.used)


class Meter:
    """What one process took on a GPU since the meter was made, others' growth included."""

    def __init__(self, pci_address: str) -> None:
        self._address = pci_address
        self._before = used_bytes(pci_address)

    def peak_bytes(self, allocated_peak: int, reserved: int) -> int | None:
        """Most that was needed at once: the allocator's peak, and all that is not the allocator's.

        ``reserved`` bytes are the allocator's now; the rest is context, NCCL, kernels and graphs.
        None where the driver does not tell.
        """
        now = used_bytes(self._address)
        if now is None or self._before is None:
            return None
        return allocated_peak + max(now - self._before - reserved, 0)
