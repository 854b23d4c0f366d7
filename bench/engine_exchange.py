"""Stage ``exchange`` of ``bench/engine.py``: our all-reduce alone, by size, in a CUDA graph.

Two ranks in this process: on two GPUs where there are two, else on two streams of one, through
pinned host memory either way. NCCL's own figures stand in its rows of ``autotune probe``.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.pinned import MESSAGE_BYTES
from kernels.exchange import Exchange, box_words, num_counters

SIZES_BYTES = (4096, 16384, 65536, 262144)
CALLS, REPEATS = 64, 9

Emit = Callable[..., None]


def stage_exchange(emit: Emit) -> None:
    """Microseconds a call, bf16, median of the repeats."""
    found = min(torch.cuda.device_count(), 2)
    devices = [torch.device("cuda", rank % found) for rank in range(2)]
    box = torch.zeros(box_words(2, MESSAGE_BYTES), dtype=torch.int64).pin_memory()
    ends = []
    for rank, device in enumerate(devices):
        counters_P = torch.zeros(num_counters(MESSAGE_BYTES), dtype=torch.int32, device=device)
        ends.append(Exchange(box, counters_P, rank=rank, num_ranks=2, message_bytes=MESSAGE_BYTES))
    for size in SIZES_BYTES:
        load(box, ends, size)
    streams = [torch.cuda.Stream(device) for device in devices]
    for size in SIZES_BYTES:
        graphs = [_captured(end, size) for end in ends]
        times_us = []
        for _ in range(1 + REPEATS):
            _synchronize(devices)
            start_s = time.perf_counter()
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            _synchronize(devices)
            times_us.append((time.perf_counter() - start_s) * 1e6 / CALLS)
        emit(
            row="exchange",
            name=f"{size >> 10} KiB, {found} GPUs",
            median=statistics.median(times_us[1:]),
            all_us=times_us[1:],
        )


def load(box: torch.Tensor, ends: list[Exchange], size_bytes: int) -> None:
    """Compile and load a size's kernels with nobody to wait for: loading may wait for the device.

    Other sizes are other kernels where Triton knows more of the number (1, or a multiple of 16).
    """
    box.fill_(1 << 32)
    for end in ends:
        with torch.cuda.device(end.counters_P.device):
            end.all_reduce(torch.zeros(size_bytes // 2, dtype=torch.bfloat16, device="cuda"))
            torch.cuda.synchronize()
            end.counters_P.zero_()
            torch.cuda.synchronize()
    box.zero_()


def _captured(end: Exchange, size_bytes: int) -> Any:
    device = end.counters_P.device
    with torch.cuda.device(device):
        x = torch.zeros(size_bytes // 2, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        # torch's own choice of a stream is the first device's
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
            for _ in range(CALLS):
                end.all_reduce(x)
        torch.cuda.synchronize()
    return graph


def _synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
