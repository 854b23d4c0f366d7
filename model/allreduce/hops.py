"""What each hop of a collective crosses on a machine: transport, path latency, shared links.

NCCL's rule (NVIDIA/nccl src/transport/p2p.cc, paths.cc, read for facts): neighbours write each
other's memory ("p2p", or "nvlink") up to a path type, by default PXB (SYS on AMD with at most two
GPUs), and go through shared host memory ("shm") beyond. The SHM buffer lies in the memory of the
sender's socket.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from model.machine import Machine
from model.nccl.paths import PATH_RANK
from model.topology import Link

Transport = Literal["nvlink", "p2p", "shm"]
TRANSPORTS: tuple[Transport, ...] = ("nvlink", "p2p", "shm")
#: a directed use of a link: (from, to, kind)
DirectedLink = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Leg:
    """One directed way of data: the links it crosses, in order."""

    links: tuple[DirectedLink, ...]
    latency_us: float


@dataclass(frozen=True, slots=True)
class Hop:
    """From one GPU to the next: a P2P or NVLink hop has one leg, an SHM hop a write and a read."""

    source: int
    target: int
    transport: Transport
    legs: tuple[Leg, ...]

    @property
    def path_us(self) -> float:
        """Latency of all legs. A read takes about as long as a posted write with its flag.

        0.71-0.80 against 0.63-0.73 us through one switch, 1.14 against 1.06 us across two
        (rtx6kpro notes).
        """
        return sum(leg.latency_us for leg in self.legs)

    @property
    def crosses_sockets(self) -> bool:
        """Whether data goes from one CPU socket to another."""
        return any(link[2] == "socket" for leg in self.legs for link in leg.links)


def hop_between(machine: Machine, a: int, b: int, level: str | None, num_ranks: int) -> Hop:
    """The hop from GPU ``a`` to GPU ``b``: peer to peer up to path type ``level``.

    None is NCCL's default level; "LOC" forbids peer traffic.
    """
    topology = machine.topology
    source, target = f"gpu{a}", f"gpu{b}"
    path_type = topology.path_type(a, b)
    if level is None:
        level = "SYS" if machine.cpu.vendor == "amd" and num_ranks <= 2 else "PXB"
    direct = machine.p2p.possible and not machine.p2p.forced_through_host
    if direct and PATH_RANK[path_type] <= PATH_RANK[level]:
        nvlink = topology.nvlink_path(source, target)
        if nvlink is not None:
            return Hop(a, b, "nvlink", (_leg(machine, nvlink, nvlink=True),))
        return Hop(a, b, "p2p", (_leg(machine, topology.host_path(source, target)),))
    memory = _memory_of(machine, topology.socket_of(source))
    write = _leg(machine, topology.host_path(source, memory))
    read = _leg(machine, topology.host_path(memory, target))
    return Hop(a, b, "shm", (write, read))


def ring_hops(machine: Machine, order: Sequence[int], level: str | None) -> tuple[Hop, ...]:
    """The hops of one ring over GPUs in ``order``, back to its first."""
    n = len(order)
    return tuple(hop_between(machine, order[i], order[(i + 1) % n], level, n) for i in range(n))


def link_rates(machine: Machine) -> dict[DirectedLink, float]:
    """GB/s of every directed link."""
    rates: dict[DirectedLink, float] = {}
    for link in machine.topology.links:
        rates[link.a, link.b, link.kind] = link.gb_per_s
        rates[link.b, link.a, link.kind] = link.gb_per_s
    return rates


def flow_rate_gb_per_s(machine: Machine, hops: Sequence[Hop], beside: Sequence[Hop]) -> float:
    """Rate that each of ``hops`` gets while all flows ``beside`` run: the fullest link decides."""
    rates = link_rates(machine)
    load = Counter(link for hop in beside for leg in hop.legs for link in leg.links)
    used = {link for hop in hops for leg in hop.legs for link in leg.links}
    return min((rates[link] / max(load[link], 1) for link in used), default=float("inf"))


def _leg(machine: Machine, path: tuple[str, ...], nvlink: bool = False) -> Leg:
    links: list[Link] = list(machine.topology.links_along(path, nvlink=nvlink))
    directed = tuple((a, b, link.kind) for (a, b), link in zip(pairwise(path), links, strict=True))
    return Leg(directed, sum(link.latency_us for link in links))


def _memory_of(machine: Machine, socket: str) -> str:
    for link in machine.topology.links:
        if link.kind == "memory" and socket in (link.a, link.b):
            return link.b if link.a == socket else link.a
    raise ValueError(
        f"machine {machine.name}: {socket} has no host memory, which traffic between GPUs needs; "
        "add a node of kind host_memory and a memory link"
    )
