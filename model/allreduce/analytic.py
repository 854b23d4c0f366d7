"""All-reduce time, analytic: serial hops plus streaming, without contention between collectives.

    t = fixed + hops x max(mean over the ring of (handover + cut_through x stream),
                           slowest transport of (occupancy x handover + stream))
Data that goes round the ring sees every hop once per turn (the mean); a rank that is slower than
the others holds all of them up at every step (the slowest): the longer of the two paths counts.
- fixed: start and end of a captured kernel, with a little per channel; Simple has more (barriers,
  connection state).
- handover of one hop: path latency + software, times a factor by protocol (LL hands over data with
  its flag; LL128 and Simple need more crossings); the first pass over the data costs up to a share
  ("burst") more, saturating in the bytes it moves. The occupancy is the part of it in which the
  rank can do nothing else.
- stream: the bytes of a hop at the rate of the channels together or of the fullest link, whichever
  is slower, with a soft corner where both are near. The first pass of a block protocol is part of
  the handover. Cut-through: the share of a stream that must have arrived before it is passed on.
Ring: 2(n-1) hops of S/n bytes. A tree on one node is a chain: 2(n-1) hops up and down, in pieces.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from model.allreduce.constants import MOST, PREFIX
from model.allreduce.design import Design
from model.allreduce.hops import TRANSPORTS

Array = npt.NDArray[np.float64]
#: a constant by its short name
Lookup = Callable[[str], Array]
Constants = Mapping[str, float] | Mapping[str, Array]

#: bytes at which half of the first pass's extra cost is paid
BURST_BYTES = 4096.0
#: steepness of the slowdown once host memory in flight exceeds the cache
SPILL_POWER = 8.0
_US_PER_BYTE = 1e-3
#: the per-channel rates are those of this many channels; scaling exponents go from there
REFERENCE_CHANNELS = 4.0


def time_us(design: Design, constants: Constants) -> Array:
    """Time of each collective when captured in a graph, us: [N], or [K, N] for constants [K, 1].

    Raises ``KeyError`` for a constant that is missing.
    """

    def c(name: str) -> Array:
        value = np.asarray(constants[PREFIX + name], dtype=np.float64)
        most = MOST.get(PREFIX + name)
        return value if most is None else np.minimum(value, most)

    parts = [
        (design.nccl > 0, _nccl_us),
        (design.one_shot + design.two_shot > 0, _direct_us),
        (design.gloo > 0, _gloo_us),
    ]
    present = [(rows, run) for rows, run in parts if rows.any()]
    if len(present) == 1 and present[0][0].all():
        return present[0][1](design, c)
    # each kind by itself: a formula of one kind has no meaning for rows of another
    times = [(rows, run(design.take(rows), c)) for rows, run in present]
    total = np.zeros((*max((t.shape[:-1] for _, t in times), key=len), len(design)))
    for rows, value in times:
        total[..., rows] = value
    return total


def _gloo_us(design: Design, c: Lookup) -> Array:
    """Gloo's ring over local sockets."""
    total: Array = (
        c("gloo_fixed_us")
        + design.hops * c("gloo_hop_us")
        + design.stream_bytes * _US_PER_BYTE / c("gloo_gb_per_s")
    )
    return total


def _nccl_us(design: Design, c: Lookup) -> Array:
    factor = design.ll + design.ll128 * c("ll128_hop") + design.simple * c("simple_hop")
    first = np.minimum(design.step_bytes, design.pass_bytes)
    burst = 1.0 + c("burst") * first / (first + BURST_BYTES)
    around, slowest, work = np.zeros(1), np.zeros(1), np.zeros(1)
    for transport in TRANSPORTS:
        share = getattr(design, f"share_{transport}")
        if not share.any():
            continue
        path = getattr(design, f"path_{transport}_us")
        handover = (path + c(f"handoff_{transport}_us")) * factor * burst
        if transport == "shm":
            handover = handover + design.simple * c("simple_host_crossings") * path
        stream = _stream_us(design, c, transport) / design.hops
        around = around + share * (handover + c("cut_through") * stream)
        busy = c("occupancy") * handover + stream
        work = work + share * busy
        slowest = np.maximum(slowest, (share > 0) * busy)
    fixed = c("fixed_us") + design.simple * c("simple_fixed_us")
    fixed = fixed + (design.channels - 1.0) * c("channel_us")
    # a ring turns on itself, so its slowest rank paces every step; in a chain only the pieces
    # after the first queue up at a rank: on its slowest way, and on its way in the other sense
    ring = design.hops * np.maximum(around, slowest)
    chain = design.hops * around + design.tail_pieces * (slowest + work)
    total: Array = fixed + np.where(design.tree > 0, chain, ring)
    return total


def _stream_us(design: Design, c: Lookup, transport: str) -> Array:
    """Time of the bytes of all hops, us, if all went by one transport.

    A channel streams what is beyond its first pass; the links carry every byte.
    """
    faster = design.ll + design.ll128 * c("ll128_rate") + design.simple * c("simple_rate")
    scaling = (
        design.ll * c("ll_scaling")
        + design.ll128 * c("ll128_scaling")
        + design.simple * c("simple_scaling")
    )
    parallel = REFERENCE_CHANNELS * (design.channels / REFERENCE_CHANNELS) ** scaling
    rate = parallel * c(f"channel_{transport}_gb_per_s") * faster
    link = design.wire / (getattr(design, f"link_{transport}_gb_per_s") * c(f"link_{transport}"))
    if transport == "shm":
        load = (design.shm_inflight_bytes / (c("host_cache_mib") * 2.0**20)) ** SPILL_POWER
        spilled = 1.0 + c("spill") * load / (1.0 + load)
        socket = design.wire / c("socket_gb_per_s") * spilled
        link = np.where(design.socket_flows > 0, np.maximum(link, socket), link)
    in_channel = design.stream_bytes * _US_PER_BYTE / rate
    on_link = design.moved_bytes * _US_PER_BYTE * link
    corner = c("corner")
    both: Array = (in_channel**corner + on_link**corner) ** (1.0 / corner)
    return both


def _direct_us(design: Design, c: Lookup) -> Array:
    """One-shot and two-shot kernels: flag hand-overs, then every rank reads all others."""
    slowest = np.maximum.reduce(
        [
            design.share_nvlink.astype(bool) * (design.path_nvlink_us + c("handoff_nvlink_us")),
            design.share_p2p.astype(bool) * (design.path_p2p_us + c("handoff_p2p_us")),
            design.share_shm.astype(bool) * (design.path_shm_us + c("handoff_shm_us")),
        ]
    )
    costs = [
        (getattr(design, f"share_{t}") > 0) / getattr(design, f"link_{t}_gb_per_s")
        for t in TRANSPORTS
    ]
    reads = design.stream_bytes * _US_PER_BYTE * np.maximum.reduce(costs) / c("direct_read")
    total: Array = c("direct_fixed_us") + design.hops * slowest + reads
    return total


def eager_us(inside_us: Array, constants: Constants) -> Array:
    """Median time of eager back-to-back calls, us: the host's call or the GPU, the longer."""
    call: Array = np.asarray(constants[PREFIX + "call_us"], dtype=np.float64)
    return np.maximum(inside_us, call)
