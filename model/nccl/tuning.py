"""NCCL's own latency and bandwidth of an all-reduce per algorithm and protocol.

This is the clock NCCL chooses by, not a good clock for PCIe (the all-reduce model is). Latency is
us, bandwidth GB/s = 10^9 bytes per second of payload; bandwidth 0 means "never chosen". NCCL
computes in C ``float``; so does this file, since equal choices need equal roundings.
Source: NVIDIA/nccl 2.27 to 2.30, src/graph/tuning.cc (read, facts only).
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from model.nccl import paths
from model.nccl import versions as v
from model.nccl.settings import ALGORITHMS, DECIDE, PROTOCOLS, NcclSettings, c_integer
from model.nccl.versions import Release

Algorithm = Literal["tree", "ring", "nvls"]
Protocol = Literal["LL", "LL128", "Simple"]
LL, LL128, SIMPLE = range(3)
#: patterns of a searched graph, as NCCL numbers them
BALANCED_TREE, SPLIT_TREE, TREE, RING, NVLS, COLLNET_DIRECT = range(1, 7)

_FLOAT = struct.Struct("f")


def f32(value: float) -> float:
    """``value`` rounded to C ``float``."""
    rounded: float = _FLOAT.unpack(_FLOAT.pack(value))[0]
    return rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One result of NCCL's graph search: channels of a pattern and what each may carry.

    ``bw_intra`` and ``bw_inter`` are GB/s per channel within and between nodes; the types are
    NCCL's path names of the farthest hop. ``orders`` lists the GPU ranks of each channel and may
    be empty when only the summary is known.
    """

    pattern: int
    num_channels: int
    bw_intra: float
    bw_inter: float
    type_intra: str
    type_inter: str
    same_channels: bool
    cross_nic: int = 0
    orders: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.num_channels < 0 or self.bw_intra < 0 or self.bw_inter < 0:
            raise ValueError(
                f"graph pattern {self.pattern}: {self.num_channels} channels of "
                f"{self.bw_intra:g}/{self.bw_inter:g} GB/s cannot be"
            )
        for name in (self.type_intra, self.type_inter):
            if name not in paths.PATH_RANK:
                raise ValueError(
                    f"path type {name!r} is unknown; known: {', '.join(paths.PATH_TYPES)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """What decides NCCL's choices: ranks, GPUs, searched graphs, channels, settings, release.

    ``num_channels`` is the final count of collective channels ("N coll channels" in the log),
    ``nvls_channels`` that of NVLink SHARP (0: not in use). ``transport`` says how neighbours
    reach each other: "P2P", "SHM", "NET" or "mixed".
    """

    release: Release
    num_ranks: int
    num_nodes: int
    min_cc: int
    max_cc: int
    cpu_vendor: str
    ring: Graph
    tree: Graph
    nvls: Graph | None
    num_channels: int
    nvls_channels: int
    settings: NcclSettings
    transport: str

    def __post_init__(self) -> None:
        if self.num_ranks < 2:
            raise ValueError(f"num_ranks {self.num_ranks} must be at least 2 for an all-reduce")
        if not 1 <= self.num_nodes <= self.num_ranks:
            raise ValueError(f"num_nodes {self.num_nodes} must be 1 to {self.num_ranks}")
        if not 1 <= self.num_channels <= v.MAX_CHANNELS:
            raise ValueError(f"num_channels {self.num_channels} must be 1 to {v.MAX_CHANNELS}")
        if not 10 <= self.min_cc <= self.max_cc:
            raise ValueError(f"compute capabilities {self.min_cc} to {self.max_cc} (90 = Hopper)")


@dataclass(frozen=True, slots=True)
class Entry:
    """Latency (us), bandwidth (GB/s, 0 = disabled) and most threads of one (algo, proto)."""

    latency_us: float
    bandwidth: float
    max_threads: int


Table = Mapping[tuple[str, str], Entry]


def thread_limit(asked: int | None, least: int, most: int, default: int) -> int:
    """Threads of a kernel after NCCL_NTHREADS: bad values fall back to the most or the least."""
    if asked is None or asked <= 0:
        return default
    if asked % v.WARP != 0 or asked > most:
        return most
    return max(asked, least)


def thread_thresholds(comm: Communicator) -> dict[tuple[str, str], int]:
    """Bytes per thread under which fewer channels and threads are used, per (algo, proto)."""
    found = {
        (algo, proto): v.THREAD_THRESHOLDS[i]
        for algo in ("tree", "ring", "nvls")
        for i, proto in enumerate(PROTOCOLS)
    }
    found["ring", "LL"] *= comm.num_ranks
    text = comm.settings.thread_thresholds
    if text is not None:
        names = [(algo, proto) for algo in ("tree", "ring") for proto in PROTOCOLS]
        for key, word in zip(names, text.split(), strict=False):
            if not word.lstrip("+-").isdigit():
                break
            if int(word) >= 0:
                found[key] = c_integer(word.lstrip("0") or "0")
    return found


def tuning_table(comm: Communicator) -> Table:
    """NCCL's "AllReduce | lat/bw" row: an entry for tree, ring and nvls with every protocol."""
    table: dict[tuple[str, str], Entry] = {}
    protocols = comm.settings.enabled_protocols()
    algorithms = comm.settings.enabled_algorithms()
    graphs: dict[str, Graph | None] = {"tree": comm.tree, "ring": comm.ring, "nvls": comm.nvls}
    for algo, graph in graphs.items():
        on = algorithms[[a.lower() for a in ALGORITHMS].index(algo)]
        for p, proto in enumerate(PROTOCOLS):
            if graph is None or graph.num_channels == 0 or (algo == "nvls" and p != SIMPLE):
                table[algo, proto] = Entry(0.0, 0.0, 0)
                continue
            wanted = protocols[p]
            if wanted == DECIDE:
                wanted = int(_ll128_safe(comm, graph))
            bandwidth = _bandwidth(comm, algo, graph, p) if wanted and on else 0.0
            table[algo, proto] = Entry(
                _latency_us(comm, algo, graph, p), bandwidth, _max_threads(comm, algo, p)
            )
    return table


def _ll128_safe(comm: Communicator, graph: Graph) -> bool:
    """Whether LL128 is on by default: only where 128-byte stores are known to stay whole."""
    farthest = paths.PXN if comm.min_cc >= 90 else paths.PXB
    alike = comm.min_cc == comm.max_cc or (comm.release.ll128_mixed and comm.min_cc >= 90)
    return (
        paths.PATH_RANK[graph.type_inter] <= farthest
        and paths.PATH_RANK[graph.type_intra] <= paths.NVB
        and alike
        and comm.min_cc >= 70
    )


def _max_threads(comm: Communicator, algo: str, proto: int) -> int:
    settings = comm.settings
    if algo == "nvls":
        return v.MAX_THREADS
    if proto == LL128:
        most = v.LL128_MAX_THREADS
        return thread_limit(settings.ll128_nthreads, most // 4, most, most)
    default = v.SIMPLE_MAX_THREADS
    if proto == SIMPLE and algo == "ring":
        slow = f32(comm.ring.bw_intra * comm.ring.num_channels) <= paths.SLOW_RING_GB_PER_S
        default = 256 if slow else default
    return thread_limit(settings.nthreads, 2 * v.WARP, v.SIMPLE_MAX_THREADS, default)


def _bandwidth(comm: Communicator, algo: str, graph: Graph, proto: int) -> float:
    row = v.generation(comm.min_cc)
    column = min(comm.num_nodes, 3) - 1
    ll_row = row if comm.num_nodes == 1 else int(comm.cpu_vendor in ("amd", "mixed"))
    ll_max = v.LL_MAX[ll_row][column]
    channels, release = graph.num_channels, comm.release
    if algo == "nvls":
        return _nvls_bandwidth(comm, graph, row)
    per_channel = graph.bw_intra if comm.num_nodes <= 2 else graph.bw_inter
    bus = f32(channels * f32(per_channel))
    if algo == "ring":
        if proto == LL:
            bus = f32(min(ll_max, bus * 0.5))
        elif proto == LL128:
            bus = f32(min(bus * 0.92, channels * release.per_channel_ring_ll128[row][column]))
        ratio = f32(comm.num_ranks / (2 * (comm.num_ranks - 1)))
        return f32(bus * ratio)
    bus = f32(min(bus * 0.92, channels * release.per_channel_tree[row][column]))
    if proto == LL:
        bus = f32(min(bus / 3.8, ll_max))
    elif proto == LL128:
        share = 7.0 / 9.0 if comm.num_nodes == 1 else 120.0 / 128.0
        bus = f32(min(bus * share, channels * release.per_channel_tree_ll128[row][column]))
    if graph.pattern == TREE:
        bus = f32(bus * 0.85)
    return f32(bus * 0.5)


def _nvls_bandwidth(comm: Communicator, graph: Graph, row: int) -> float:
    """NVLink SHARP within one node (on several nodes it needs a collective network)."""
    if comm.num_nodes > 1:
        return 0.0
    channels = graph.num_channels
    if not comm.release.nvls_efficiency:
        per_channel = min(graph.bw_intra, graph.bw_inter)
        return f32(f32(channels * per_channel) * f32(5.0 / 6.0))
    if channels < 2:
        return 0.0
    intra = f32(f32(f32(graph.bw_intra * f32(v.NVLS_EFFICIENCY[row])) * (channels - 1)) / channels)
    per_channel = min(f32(intra * 2.0), graph.bw_inter)
    ratio = f32(comm.num_ranks / (2 * (comm.num_ranks - 1)))
    return f32(f32(channels * per_channel) * ratio)


def _latency_us(comm: Communicator, algo: str, graph: Graph, proto: int) -> float:
    ranks, nodes = comm.num_ranks, comm.num_nodes
    link = "nvlink" if paths.PATH_RANK[graph.type_intra] == paths.NVL else "pci"
    if algo == "nvls":
        return v.NVLS_HOP_US[link] + (v.NVLS_HOP_US["net"] if nodes > 1 else 0.0)
    hops, base = (
        (v.RING_HOP_US, v.RING_BASE_US) if algo == "ring" else (v.TREE_HOP_US, v.TREE_BASE_US)
    )
    # with one rank per node a network hop is fully exposed: the tree's latency counts
    inter = (v.TREE_HOP_US if ranks == nodes else hops)["net"][proto]
    intra = hops[link][proto]
    latency = f32(base[proto])
    if algo == "tree":
        depth = nodes.bit_length() - 1
        return f32(latency + 2 * f32((ranks // nodes - 1) * f32(intra) + depth * f32(inter)))
    inter_steps = 0
    if nodes > 1:
        overhead = 2.0 if comm.cpu_vendor == "amd" else 1.0
        intra = max(intra, overhead * (3 if proto == SIMPLE else 1))
        inter_steps = 2 * (nodes - 1)
    steps = 2 * (ranks - 1)
    return f32(latency + f32((steps - inter_steps) * f32(intra) + inter_steps * f32(inter)))
