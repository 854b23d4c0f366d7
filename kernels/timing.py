"""Timing an op on a GPU with a cold L2, and checking it against its reference.

Calls are captured in one CUDA graph, each with other weights, so that every call finds its weights
in memory and not in the cache, and so that a launch costs what it costs in the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from kernels.catalog import Case, Inputs
from kernels.launch import programmatic_launch
from kernels.opset import opset

#: bytes that the rotated weights of one case should have together: several times any GPU's L2
ROTATION_BYTES = 400_000_000
MAX_COPIES = 128
MIN_CALLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds per call: median and range over the replays."""

    us: float
    low_us: float
    high_us: float


def rotated_inputs(case: Case, device: torch.device, dtype: torch.dtype) -> list[Inputs]:
    """Inputs that differ in their weights, or in the experts that they touch.

    Together they touch ``ROTATION_BYTES``, so that none finds its weights in the cache.
    """
    first = case.make(device, dtype)
    size = sum(first[name].numel() * first[name].element_size() for name in case.weights)
    if size == 0:
        return [first]
    routed = "expert" in first
    touched = max(1, case.min_bytes(first)) if routed else size
    clones = min(MAX_COPIES, -(-ROTATION_BYTES // size))
    copies = max(4, clones, min(MAX_COPIES, -(-ROTATION_BYTES // touched)))
    clones = clones if routed or size >= ROTATION_BYTES else copies
    weights = [{name: first[name] for name in case.weights}] + [
        {name: first[name].clone() for name in case.weights} for _ in range(clones - 1)
    ]
    found = [first]
    for number in range(1, copies):
        other = dict(first) | weights[number % clones]
        if routed:
            # another routing over the same experts touches other weights
            logits = torch.rand(first["expert"].shape[0], first["gate_up"].shape[0])
            other["expert"] = logits.topk(first["expert"].shape[1], dim=-1).indices.to(device)
        found.append(other)
    return found


def time_calls(calls: Sequence[Callable[[], Any]], replays: int, pdl: bool) -> Timing:
    """Capture the calls in order (repeated to ``MIN_CALLS``) and replay them."""
    todo = list(calls)
    while len(todo) < MIN_CALLS:
        todo += calls
    with programmatic_launch(pdl):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in todo:
                call()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1000 / len(todo) for a, b in pairwise(marks)]
    return Timing(us=median(times), low_us=min(times), high_us=max(times))


def time_case(case: Case, inputs: Sequence[Inputs], replays: int, pdl: bool) -> Timing:
    """Time the Triton op over the rotated inputs."""
    ops = opset("triton")
    return time_calls([lambda i=i: case.run(ops, i) for i in inputs], replays, pdl)


def relative_error(case: Case, inputs: Inputs) -> float:
    """Largest deviation of the Triton op from the reference, over the largest reference value.

    Both run on copies of the inputs; outputs of integers count with the share that differs. A case
    with its own ``check`` is judged by that.
    """
    if case.check is not None:
        return case.check(inputs, case.run(opset("triton"), inputs))
    outputs = []
    for name in ("reference", "triton"):
        own = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in inputs.items()
            if key not in case.weights
        } | {key: inputs[key] for key in case.weights}
        result = case.run(opset(name), own)
        outputs.append(result if isinstance(result, tuple) else (result,))
    worst = 0.0
    for wanted, got in zip(*outputs, strict=True):
        if wanted is None:
            continue
        if wanted.dtype == torch.int64:
            worst = max(worst, float((wanted != got).float().mean()))
            continue
        wide = wanted.float()
        error = (got.float() - wide).abs().max() / wide.abs().max().clamp(min=1e-6)
        # NaN must not pass as small
        worst = max(worst, float(error.nan_to_num(float("inf"), float("inf"))))
    return worst
