"""Collectives as arrays: everything that the time of an all-reduce depends on, constants apart.

A row is one collective of one size. Building rows asks NCCL's selector and walks the topology
once; predicting many rows for many constants is then pure numpy (``model.allreduce.analytic``).
Sizes are bytes, rates GB/s = 10^9 bytes per second, times us.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt

from model.allreduce.hops import (
    TRANSPORTS,
    Hop,
    flow_rate_gb_per_s,
    hop_between,
    ring_hops,
)
from model.identity import ById
from model.machine import Machine

Array = npt.NDArray[np.float64]
PROTOCOLS = ("LL", "LL128", "Simple")
#: bytes per thread that are handed over before streaming begins: nothing in LL, which streams
#: line by line; eight 16-byte lines of 120 bytes of data per warp in LL128; an element in Simple
PASS_BYTES_PER_THREAD = {"LL": 0.0, "LL128": 15.0, "Simple": 2.0}
#: bytes on the wire per byte of payload
WIRE_FACTOR = {"LL": 2.0, "LL128": 16.0 / 15.0, "Simple": 1.0}
#: payload bytes of one of a connection's 8 slots, by protocol, at the default buffer size
SLOT_BYTES = {"LL": 32768.0, "LL128": 576000.0, "Simple": 524288.0}
NUM_SLOTS = 8
_DEFAULT_BUFFSIZE = 4 << 20
#: most pieces that a tree's pipeline is modelled with
MAX_PIECES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """N collectives as arrays [N]. ``share_*`` are one-hot or shares of hops, 0 to 1."""

    nccl: Array
    gloo: Array
    one_shot: Array
    two_shot: Array
    num_ranks: Array
    size_bytes: Array
    #: serial hops from start to end
    hops: Array
    ll: Array
    ll128: Array
    simple: Array
    tree: Array
    share_nvlink: Array
    share_p2p: Array
    share_shm: Array
    #: mean path latency of a hop of each transport, us
    path_nvlink_us: Array
    path_p2p_us: Array
    path_shm_us: Array
    channels: Array
    #: bytes that a channel moves in one hop, and how many of them the first pass covers
    step_bytes: Array
    pass_bytes: Array
    #: bytes that pass through the busiest rank's channel beyond the first passes, all channels
    stream_bytes: Array
    #: the same with the first passes: what the links carry, flags apart
    moved_bytes: Array
    #: pieces of a tree's pipeline after the first, which the slowest rank handles twice
    tail_pieces: Array
    wire: Array
    #: share of the slowest links that a flow gets, by what the bottleneck carries
    link_nvlink_gb_per_s: Array
    link_p2p_gb_per_s: Array
    link_shm_gb_per_s: Array
    #: flows through host memory at once, and those that also cross between sockets
    shm_flows: Array
    socket_flows: Array
    #: bytes of host memory in flight (SHM slots in use)
    shm_inflight_bytes: Array

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """All rows of ``parts``, in order."""
        return cls(
            **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)}
        )

    def take(self, index: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Self:
        """The rows at ``index`` (positions or mask)."""
        return type(self)(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def __len__(self) -> int:
        return len(self.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How NCCL runs one size: the selector's answer, in plain values."""

    algo: str
    proto: str
    channels: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """Transports of a ring (or chain): shares, path latencies, link shares, flows."""

    share: dict[str, float]
    path_us: dict[str, float]
    link: dict[str, float]
    shm_flows: int
    socket_flows: int


def nccl_design(
    machine: Machine,
    num_ranks: int,
    sizes_bytes: Sequence[int],
    plans: Sequence[Plan],
    orders: Sequence[Sequence[int]],
    p2p_level: str | None,
    buffsize_bytes: int | None = None,
) -> Design:
    """Rows of NCCL all-reduces: one per size, run as its plan says over rings ``orders``."""
    check_ranks(machine, num_ranks)
    ways = _ring_ways(ById(machine), tuple(map(tuple, orders)), p2p_level)
    rows = [
        _nccl_row(num_ranks, size, plan, ways[plan.algo], len(orders), buffsize_bytes)
        for size, plan in zip(sizes_bytes, plans, strict=True)
    ]
    return _stack(rows)


@lru_cache(maxsize=256)
def _ring_ways(
    machine: ById[Machine], orders: tuple[tuple[int, ...], ...], p2p_level: str | None
) -> Mapping[str, _Ways]:
    """The ways of rings and trees, whatever their size and protocol."""
    rings = [ring_hops(machine.value, order, p2p_level) for order in orders]
    # a chain is the ring without its last hop; up and down take the links' two directions in turn
    chains = [hop for ring in rings for hop in ring[:-1]]
    return {
        "ring": _ways(machine.value, [hop for ring in rings for hop in ring]),
        "tree": _ways(machine.value, chains),
    }


def tree_pieces(share_bytes: float, slot_bytes: float) -> int:
    """Pieces that a tree cuts a channel's share into: a slot each, at most ``MAX_PIECES``."""
    return min(MAX_PIECES, max(1, math.ceil(share_bytes / slot_bytes)))


def direct_design(
    machine: Machine, num_ranks: int, sizes_bytes: Sequence[int], kind: str
) -> Design:
    """Rows of one-shot or two-shot kernels, in which every rank reads every other rank.

    Without peer access every rank writes to host memory and reads the others' there.
    """
    check_ranks(machine, num_ranks)
    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    hops = [hop_between(machine, a, b, "SYS", num_ranks) for a, b in pairs]
    ways = _ways(machine, hops)
    # each rank takes in num_ranks - 1 flows at once, so per-rank inflow is that many flow shares
    for transport in ways.link:
        ways.link[transport] *= num_ranks - 1
    farthest = {
        t: max((h.path_us for h in hops if h.transport == t), default=0.0) for t in TRANSPORTS
    }
    n = num_ranks
    rows = []
    for size in sizes_bytes:
        check_size(size)
        volume = (n - 1) * size if kind == "one_shot" else 2 * (n - 1) / n * size
        syncs = 2.0 if kind == "one_shot" else 3.0
        rows.append(
            _row(ways, kind=kind, num_ranks=n, size_bytes=size, hops=syncs, stream_bytes=volume)
            | {f"path_{t}_us": farthest[t] for t in TRANSPORTS}
        )
    return _stack(rows)


def gloo_design(num_ranks: int, sizes_bytes: Sequence[int]) -> Design:
    """Rows of gloo's ring over local sockets between CPU processes."""
    if num_ranks < 2:
        raise ValueError(f"num_ranks {num_ranks} must be at least 2 for an all-reduce")
    none = _Ways(share={}, path_us={}, link={}, shm_flows=0, socket_flows=0)
    rows = []
    for size in sizes_bytes:
        check_size(size)
        rows.append(
            _row(
                none,
                kind="gloo",
                num_ranks=num_ranks,
                size_bytes=size,
                hops=2.0 * (num_ranks - 1),
                stream_bytes=2.0 * (num_ranks - 1) / num_ranks * size,
            )
        )
    return _stack(rows)


def check_ranks(machine: Machine, num_ranks: int) -> None:
    """Raise ``ValueError`` unless the machine has ``num_ranks`` GPUs, at least 2."""
    if num_ranks < 2:
        raise ValueError(f"num_ranks {num_ranks} must be at least 2 for an all-reduce")
    if num_ranks > machine.num_gpus:
        raise ValueError(
            f"num_ranks {num_ranks} is above the {machine.num_gpus} GPUs of {machine.name}"
        )


def check_size(size_bytes: float) -> None:
    """Raise ``ValueError`` for a message below one byte."""
    if not size_bytes >= 1:
        raise ValueError(f"size_bytes {size_bytes} must be at least 1 byte")


def _ways(machine: Machine, hops: Sequence[Hop]) -> _Ways:
    by = {t: [hop for hop in hops if hop.transport == t] for t in TRANSPORTS}
    return _Ways(
        share={t: len(by[t]) / len(hops) for t in TRANSPORTS},
        path_us={
            t: sum(h.path_us for h in by[t]) / len(by[t]) if by[t] else 0.0 for t in TRANSPORTS
        },
        link={t: flow_rate_gb_per_s(machine, by[t], hops) for t in TRANSPORTS},
        shm_flows=len(by["shm"]),
        socket_flows=sum(hop.crosses_sockets for hop in by["shm"]),
    )


def _nccl_row(
    n: int, size: int, plan: Plan, ways: _Ways, num_orders: int, buffsize: int | None
) -> dict[str, float]:
    check_size(size)
    proto, channels = plan.proto, plan.channels
    passed = PASS_BYTES_PER_THREAD[proto] * max(plan.threads - 32 * (proto == "Simple"), 64)
    slot = SLOT_BYTES[proto]
    if proto == "Simple" and buffsize is not None:
        slot *= buffsize / _DEFAULT_BUFFSIZE
    hops = 2 * (n - 1)
    pieces = tree_pieces(size / channels, slot) if plan.algo == "tree" else 1
    step = size / channels / (pieces if plan.algo == "tree" else n)
    stream = channels * hops * max(0.0, step - passed)
    moved = channels * hops * step
    used = min(step, slot * (4 if proto == "Simple" else 1))
    per_slot = min(used, slot)
    flows = ways.shm_flows / num_orders
    return _row(
        ways,
        kind="nccl",
        num_ranks=n,
        size_bytes=size,
        hops=hops,
        stream_bytes=stream,
    ) | {
        proto.lower(): 1.0,
        "tree": float(plan.algo == "tree"),
        "channels": channels,
        "step_bytes": step,
        "moved_bytes": moved,
        "tail_pieces": pieces - 1.0,
        "pass_bytes": passed,
        "wire": WIRE_FACTOR[proto],
        "shm_flows": flows,
        "socket_flows": ways.socket_flows / num_orders,
        "shm_inflight_bytes": flows * channels * NUM_SLOTS * per_slot * WIRE_FACTOR[proto],
        # rings share the links with each other: all channels together get the whole share
        **{f"link_{t}_gb_per_s": ways.link[t] * num_orders for t in TRANSPORTS},
    }


def _row(
    ways: _Ways, kind: str, num_ranks: int, size_bytes: float, hops: float, stream_bytes: float
) -> dict[str, float]:
    row = dict.fromkeys((f.name for f in fields(Design)), 0.0)
    row |= {
        kind: 1.0,
        "num_ranks": num_ranks,
        "size_bytes": size_bytes,
        "hops": hops,
        "stream_bytes": stream_bytes,
        "channels": 1.0,
        "wire": 1.0,
        "shm_flows": ways.shm_flows,
        "socket_flows": ways.socket_flows,
    }
    for transport in TRANSPORTS:
        row[f"share_{transport}"] = ways.share.get(transport, 0.0)
        row[f"path_{transport}_us"] = ways.path_us.get(transport, 0.0)
        row[f"link_{transport}_gb_per_s"] = ways.link.get(transport, float("inf"))
    return row


def _stack(rows: Sequence[dict[str, float]]) -> Design:
    return Design(**{f.name: np.array([row[f.name] for row in rows]) for f in fields(Design)})
