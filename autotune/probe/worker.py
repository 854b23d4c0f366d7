"""Runs in a process of its own: times torch's op dispatch on the CPU, or one host's GPUs.

``python -m autotune.probe.worker WHAT`` prints one JSON object on stdout. A process of its own,
because launch cost differs from process to process, a CUDA context would stay in the caller, and a
broken peer path hangs: the caller can end it.
"""

import json
import sys
import time
from typing import Any

_OPS_PER_SAMPLE = 100
_SAMPLES = 200
_COPY_BYTES = 256 * 2**20
_COPIES = 8
_LOAD_S = 120.0


def cpu_dispatch() -> dict[str, Any]:
    """us per op of tiny tensors: what an op costs before any data is moved."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    x, w, index = torch.ones(1, 64), torch.ones(64, 64), torch.tensor([0])
    out = torch.empty_like(x)

    def ops() -> None:
        for _ in range(_OPS_PER_SAMPLE // 4):
            torch.mul(x, x, out=out)
            torch.mm(x, w, out=out)
            torch.add(out, x)
            torch.index_select(x, 0, index)

    return {"dispatch_us": _per_op(ops, lambda: None)}


def gpu_launch() -> dict[str, Any]:
    """us per tiny kernel, launched one by one and replayed from a CUDA graph."""
    import torch

    torch.set_grad_enabled(False)
    x = torch.ones(64, device="cuda")

    def ops() -> None:
        for _ in range(_OPS_PER_SAMPLE):
            x.add_(1.0)

    eager = _per_op(ops, torch.cuda.synchronize)
    cuda: Any = torch.cuda
    stream = cuda.Stream()
    with torch.cuda.stream(stream):
        ops()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops()
    return {"eager_us": eager, "graph_us": _per_op(graph.replay, torch.cuda.synchronize)}


def gpu_rates() -> dict[str, Any]:
    """Facts and rates of every GPU; rates in GB/s (10^9 bytes), flops in TFLOP/s."""
    import torch

    torch.set_grad_enabled(False)
    count = torch.cuda.device_count()
    result: dict[str, Any] = {"gpus": [_facts(index) for index in range(count)]}
    result["peers"] = [
        [a, b, torch.cuda.can_device_access_peer(a, b)]
        for a in range(count)
        for b in range(count)
        if a != b
    ]
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    for index in range(count):
        with torch.cuda.device(index):
            device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
            result["gpus"][index] |= {
                "to_gpu": _copies(device, host),
                "to_host": _copies(host, device),
                "dram": _dram_rates(),
                "bf16_tflops": _matmul_tflops(),
            }
            del device
    return result


def _facts(index: int) -> dict[str, Any]:
    import torch

    found: Any = torch.cuda.get_device_properties(index)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "num_sms": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "l2_bytes": getattr(found, "L2_cache_size", None),
        "smem_bytes": getattr(found, "shared_memory_per_block_optin", None),
        # kHz and bits; older releases of torch do not tell
        "memory_clock_khz": getattr(found, "memory_clock_rate", None),
        "memory_bus_bits": getattr(found, "memory_bus_width", None),
        "address": (
            f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
            if hasattr(found, "pci_bus_id")
            else None
        ),
    }


def _copies(target: Any, source: Any) -> list[float]:
    return [_COPY_BYTES / s / 1e9 for s in _timed(lambda: target.copy_(source, non_blocking=True))]


def _dram_rates() -> list[float]:
    """Reading more than any cache holds: weights are read, hardly written."""
    import torch

    x = torch.rand(2**30 // 4, device="cuda")
    return [x.numel() * 4 / s / 1e9 for s in _timed(lambda: x.amax())]


def _matmul_tflops() -> list[float]:
    import torch

    n = 8192
    # equal numbers toggle few bits: a product of them draws less power and runs up to 13 % faster
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return [2 * n**3 / s / 1e12 for s in _timed(lambda: torch.mm(a, a, out=out))]


def _timed(call: Any) -> list[float]:
    """Seconds of each repeat by CUDA events, two to warm up left out."""
    import torch

    cuda: Any = torch.cuda
    found = []
    for _ in range(_COPIES + 2):
        start = cuda.Event(enable_timing=True)
        end = cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return found[2:]


def _per_op(ops: Any, wait: Any) -> list[float]:
    for _ in range(20):
        ops()
    wait()
    found = []
    for _ in range(_SAMPLES):
        start = time.perf_counter()
        ops()
        wait()
        found.append((time.perf_counter() - start) / _OPS_PER_SAMPLE * 1e6)
    return found


def gpu_load() -> dict[str, Any]:
    """Copy to every GPU until somebody ends this process; says "copying" once it runs."""
    import torch

    host = torch.empty(_COPY_BYTES // 4, dtype=torch.uint8, pin_memory=True)
    targets = [
        torch.empty(len(host), dtype=torch.uint8, device=f"cuda:{index}")
        for index in range(torch.cuda.device_count())
    ]
    started, told = time.monotonic(), False
    # a caller that died must not leave this running for ever
    while time.monotonic() - started < _LOAD_S:
        for target in targets:
            target.copy_(host, non_blocking=True)
        for index in range(len(targets)):
            torch.cuda.synchronize(index)
        if not told and time.monotonic() - started > 1.0:
            print("copying", flush=True)
            told = True
    return {}


_TASKS = {
    "gpu-load": gpu_load,
    "cpu-dispatch": cpu_dispatch,
    "gpu-launch": gpu_launch,
    "gpu-rates": gpu_rates,
}


def main() -> None:
    """Run the task named on the command line."""
    json.dump(_TASKS[sys.argv[1]](), sys.stdout)


if __name__ == "__main__":
    main()
