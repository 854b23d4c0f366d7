"""Faults for tests on a GPU: kernels that do not end, memory that is taken, loads of known kind."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.device_memory import used_bytes

#: a kernel that spins this long ends by itself, should nobody end its process
SPIN_S = 40.0
_ROOT = Path(__file__).parents[2]

#: a worker started with this in front of its path launches a spinning kernel on SIGUSR1
_SITECUSTOMIZE = f"""
import signal

def _spin(number, frame):
    import torch
    torch.cuda._sleep(int({SPIN_S} * 2e9))

signal.signal(signal.SIGUSR1, _spin)
"""

_LOADS = {
    # one thread of one block turns round and round: what waiting for a peer looks like
    "spin": "torch.cuda._sleep(int(0.05 * 2e9))",
    "matmul": "torch.mm(a, a, out=b)",
}
_LOAD = """
import sys, time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
b = torch.empty_like(a)
end, told = time.monotonic() + 20, False
while time.monotonic() < end:
    {body}
    torch.cuda.synchronize()
    if not told:
        print("running", flush=True)
        told = True
"""


def spin_on_signal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers started from now on obey SIGUSR1."""
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    path = [str(folder), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


def address() -> str:
    """PCI address of the first GPU."""
    found = torch.cuda.get_device_properties(0)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def used_mib() -> float:
    """In use on the first GPU, by anybody."""
    used = used_bytes(address())
    assert used is not None, "the driver's library does not tell the memory in use"
    return used / 2**20


def own_context() -> None:
    """Take this process's share of the first GPU now: it counts into every reading that follows."""
    torch.empty(1, device="cuda:0")
    torch.cuda.synchronize()


def holders() -> set[int] | None:
    """Processes that hold memory of a GPU by the driver; None where it lists none (containers)."""
    done = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = {int(line) for line in done.stdout.split() if line.isdigit()}
    # this process has a context: a list without it is not one of our processes
    return found if os.getpid() in found else None


def lets_go(pids: Iterable[int], before_mib: float, patience_s: float = 10.0) -> bool:
    """Whether ``pids`` hold no memory any more; by the memory in use where pids are not told."""
    if holders() is None:
        return settles_at(before_mib)
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if not set(pids) & (holders() or set()):
            return True
        time.sleep(0.1)
    return False


def settles_at(mib: float, within_mib: float = 64.0, patience_s: float = 10.0) -> bool:
    """Whether memory in use comes back to ``mib``: a killed process's is freed a little later."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if used_mib() <= mib + within_mib:
            return True
        time.sleep(0.1)
    return False


@contextmanager
def only_free(mib: float) -> Iterator[None]:
    """Take all memory of the first GPU but ``mib``."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(0)
    held = torch.empty(max(free - int(mib * 2**20), 0), dtype=torch.uint8, device="cuda:0")
    try:
        yield
    finally:
        del held
        torch.cuda.empty_cache()


@contextmanager
def load(kind: str) -> Iterator[None]:
    """Keep the first GPU busy with ``kind`` from a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LOAD.format(body=_LOADS[kind])],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "running"
        # utilization is a mean over up to a second, power over a little less
        time.sleep(2.5)
        yield
    finally:
        process.kill()
        process.wait()
