"""What every launcher needs: the launch itself, its recording, and facts about the device.

All kernels go through ``launch``. Under ``recording()`` a launch is noted instead of run, so that
launchers can be driven with meta tensors and every configuration compiled without a GPU.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

#: multiprocessors assumed where there is no GPU to ask (an H200's)
_DEFAULT_MULTIPROCESSORS = 132
#: arrival counters a device has for split kernels; see ``arrival_counters``
NUM_COUNTERS = 65536


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch: kernel, grid, positional arguments and meta-parameters."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]


@dataclass(slots=True)
class _State:
    recorder: list[Launch] | None = None
    pdl: bool | frozenset[str] | None = None


_state = _State()


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Within this block launches are appended to the list it yields and not run."""
    previous, launches = _state.recorder, []
    _state.recorder = launches
    try:
        yield launches
    finally:
        _state.recorder = previous


@contextmanager
def programmatic_launch(enabled: bool | frozenset[str]) -> Iterator[None]:
    """Switch programmatic dependent launch on or off within this block (see ``pdl_for``).

    A set of op names switches it on for their kernels alone.
    """
    previous, _state.pdl = _state.pdl, enabled
    try:
        yield
    finally:
        _state.pdl = previous


def pdl_for(device: torch.device, op: str = "other") -> bool:
    """Whether ``op``'s kernels may start before their predecessor has ended (sm_90 and later).

    Such a kernel fetches its weights while the predecessor finishes, then waits for it. Off unless
    the environment's ``AUTOTUNE_PDL`` is 1 or names the op (``linear_add,norm_route``), or the
    caller is inside ``programmatic_launch``. Any mixture is right: a kernel without it neither
    starts early nor lets the next one.
    """
    wanted = _state.pdl
    if wanted is None:
        named = os.environ.get("AUTOTUNE_PDL", "0")
        wanted = named == "1" if named in ("0", "1", "") else frozenset(named.split(","))
    if not isinstance(wanted, bool):
        wanted = op in wanted
    if not wanted or device.type == "cpu":
        return False
    return device.type == "meta" or torch.cuda.get_device_capability(device)[0] >= 9


def launch(kernel: Any, grid: Sequence[int], *args: Any, **meta: Any) -> None:
    """Run ``kernel`` on ``grid``, or record it.

    Kernels read vectors element after element, so a vector with gaps (or one element repeated, as
    ``expand`` makes) would be read past its end: ``ValueError``.
    """
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.dim() == 1 and not arg.is_contiguous():
            raise ValueError(
                f"{kernel.__name__}: a vector of {arg.shape[0]} elements has stride "
                f"{arg.stride(0)}; make it contiguous"
            )
    if _state.recorder is not None:
        _state.recorder.append(Launch(kernel, tuple(grid), args, meta))
        return
    kernel[tuple(grid)](*args, **meta)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; an H200's number for any other."""
    if device.type != "cuda":
        return _DEFAULT_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that a block may have on a CUDA device; 0 (unknown) for any other."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def waiting_programs(device: torch.device, wanted: int, groups: int = 1) -> int:
    """How many programs of each of ``groups`` may wait for the others (``turn_among_last``).

    ``wanted``, unless all that wait might leave no multiprocessor to those they wait for: then 1,
    which waits for nobody. The interpreter runs one program after the other, so 1 there.
    """
    if device.type == "cpu" or wanted * groups >= num_multiprocessors(device):
        return 1
    return wanted


_counters: dict[torch.device, torch.Tensor] = {}


def arrival_counters(device: torch.device, count: int) -> torch.Tensor:
    """``count`` int32 zeros for "am I the last program"; the last one sets its counter back to 0.

    One buffer a device, so kernels that use it must run on one stream at a time. Raises
    ``ValueError`` when more are asked for than there are and ``RuntimeError`` when the first use
    falls into a graph capture (the zeros would be written by the graph, not now).
    """
    if count > NUM_COUNTERS:
        raise ValueError(f"a split kernel needs {count} counters; there are {NUM_COUNTERS}")
    buffer = _counters.get(device)
    if buffer is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run the forward once before capturing it in a CUDA graph")
        buffer = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
        _counters[device] = buffer
    return buffer


def pow2(value: int, low: int = 1) -> int:
    """The smallest power of two that is at least ``value`` and ``low``."""
    return max(low, int(triton.next_power_of_2(value)))


def cdiv(value: int, divisor: int) -> int:
    """``value / divisor`` rounded up."""
    return -(-value // divisor)


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)
