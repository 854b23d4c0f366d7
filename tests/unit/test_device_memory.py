"""Memory in use on a GPU by the driver's library: what is told, and what is not."""

import shutil
import subprocess
from pathlib import Path

import pytest

import engine.device_memory as device_memory
from engine.device_memory import Meter, used_bytes

_NVML = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
static unsigned long long used = %d;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) {
    *device = &used;
    return strcmp(address, "0000:06:00.0") ? 6 : 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = 1000; memory->used = *(unsigned long long *)device;
    memory->free = memory->total - memory->used;
    *(unsigned long long *)device += %d;
    return 0;
}
"""


@pytest.fixture
def library(tmp_path: Path) -> str:
    """A library with NVML's interface: 300 bytes in use, 250 more at each look."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler")
    source, built = tmp_path / "nvml.c", tmp_path / "libnvml.so"
    source.write_text(_NVML % (300, 250))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, source], check=True)
    return str(built)


def test_the_library_is_read_through_its_own_structures(library: str) -> None:
    assert used_bytes("0000:06:00.0", library) == 300
    assert used_bytes("0000:06:00.0", library) == 550


def test_an_unknown_gpu_or_a_missing_library_tells_nothing(library: str) -> None:
    assert used_bytes("0000:07:00.0", library) is None
    assert used_bytes("0000:06:00.0", "libnot-there.so.1") is None


def test_a_meter_adds_what_is_not_the_allocators_to_its_peak(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "_LIBRARY", library)
    meter = Meter("0000:06:00.0")
    # 250 bytes more are in use, 100 of them the allocator's, which once held 180
    assert meter.peak_bytes(allocated_peak=180, reserved=100) == 180 + 150


def test_a_meter_without_the_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_LIBRARY", "libnot-there.so.1")
    assert Meter("0000:06:00.0").peak_bytes(allocated_peak=180, reserved=100) is None
