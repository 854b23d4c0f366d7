"""All-reduce time, discrete-event: chunks through channels over the topology, with contention.

Every rank and channel is a SimPy process that waits for its chunk, works on it and passes it on.
Links are shared evenly by the flows on them, whatever channel or collective they belong to; ranks
may arrive late. Posted-write collapse is a rule on the state: while GPUs of one switch write to
several root ports, that switch's uplink falls to its collapsed rate. Without contention and skew
the result is the analytic form (``model.allreduce.analytic``); a test holds the two together.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import simpy

from model.allreduce.analytic import BURST_BYTES, REFERENCE_CHANNELS, SPILL_POWER
from model.allreduce.constants import MOST, PREFIX
from model.allreduce.design import (
    NUM_SLOTS,
    PASS_BYTES_PER_THREAD,
    SLOT_BYTES,
    WIRE_FACTOR,
    Plan,
    tree_pieces,
)
from model.allreduce.hops import DirectedLink, Hop, link_rates
from model.machine import Machine

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One all-reduce to simulate: hops per ring order, plan, size (bytes)."""

    num_ranks: int
    size_bytes: int
    plan: Plan
    #: per ring order, the hop that leaves each position, and the same hop the other way
    rings: tuple[tuple[Hop, ...], ...]
    back: tuple[tuple[Hop, ...], ...]


@dataclass(slots=True)
class Links:
    """The directed links, each shared evenly by the flows that are on it.

    A flow's share is that of the moment it starts: later flows slow down themselves only.
    """

    rate_gb_per_s: Mapping[DirectedLink, float]
    flows: dict[DirectedLink, int] = field(default_factory=lambda: defaultdict(int))

    def enter(self, links: Sequence[DirectedLink]) -> None:
        """A flow begins on these links."""
        for link in links:
            self.flows[link] += 1

    def leave(self, links: Sequence[DirectedLink]) -> None:
        """The flow is through."""
        for link in links:
            self.flows[link] -= 1

    def time_us(self, work: Sequence[tuple[DirectedLink, float]]) -> float:
        """Time of a flow that has entered, from its work (us, alone) on each link."""
        return max(alone_us * self.flows[link] for link, alone_us in work)


@dataclass(slots=True)
class PostedWrites:
    """Which GPUs write through which switch to which root port right now (the collapse rule)."""

    min_sources: int | None
    active: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))

    def enter(self, hop: Hop) -> list[tuple[str, tuple[int, str]]]:
        """A write begins; returns what ``leave`` needs."""
        tokens = [(switch, (hop.source, root)) for switch, root in uplinks(hop)]
        for switch, flow in tokens:
            self.active[switch].append(flow)
        return tokens

    def leave(self, tokens: Sequence[tuple[str, tuple[int, str]]]) -> None:
        """The write is through."""
        for switch, flow in tokens:
            self.active[switch].remove(flow)

    def collapsed(self, switch: str) -> bool:
        """Whether enough GPUs of this switch write to two or more root ports."""
        if self.min_sources is None:
            return False
        flows = self.active[switch]
        sources = {source for source, _ in flows}
        return len(sources) >= self.min_sources and len({root for _, root in flows}) >= 2


def uplinks(hop: Hop) -> list[tuple[str, str]]:
    """(switch, root port that the data ends at) of a posted peer write that leaves its switch."""
    if hop.transport != "p2p":
        return []
    path = hop.legs[0].links
    # downwards from a socket the last root port is the one that receives the writes
    roots = [b for _, b, kind in path if kind == "fabric" and not b.startswith("socket")]
    roots += [a for a, b, kind in path if kind == "fabric" and b.startswith("socket")]
    ups = [a for i, (a, _, kind) in enumerate(path) if i == 1 and kind == "pcie" and roots]
    return [(switch, roots[0]) for switch in ups]


def _crossing(hop: Hop) -> DirectedLink | None:
    """What crosses sockets through shared memory is limited by itself, per direction."""
    if hop.transport != "shm":
        return None
    for a, b, kind in (link for leg in hop.legs for link in leg.links):
        if kind == "socket":
            return (a, b, "shared memory")
    return None


def simulate(
    machine: Machine,
    collective: Collective,
    constants: Mapping[str, float],
    arrivals_us: Sequence[float],
) -> tuple[float, ...]:
    """When each rank is done, us, if rank r starts its kernel at ``arrivals_us[r]``."""
    if len(arrivals_us) != collective.num_ranks:
        raise ValueError(
            f"{len(arrivals_us)} arrival times for {collective.num_ranks} ranks: one each (us)"
        )
    run = _Run(machine, collective, constants)
    if collective.plan.algo == "tree":
        run.start_tree(arrivals_us)
    else:
        run.start_ring(arrivals_us)
    run.env.run()
    return tuple(run.done_us)


class _Run:
    """One simulation: environment, links, inboxes."""

    def __init__(
        self, machine: Machine, collective: Collective, constants: Mapping[str, float]
    ) -> None:
        self.env = simpy.Environment()
        self.collective = collective
        self.done_us = [0.0] * collective.num_ranks
        rates = link_rates(machine)
        self.links = Links(rates)
        self.writes = PostedWrites(machine.p2p.posted_write_collapse_sources)
        self.collapsed_rate = machine.p2p.posted_write_collapse_gb_per_s
        self.c: Callable[[str], float] = lambda name: min(
            constants[PREFIX + name], MOST.get(PREFIX + name, inf)
        )
        plan, c = collective.plan, self.c
        self.factor = {"LL": 1.0, "LL128": c("ll128_hop"), "Simple": c("simple_hop")}[plan.proto]
        self.faster = {"LL": 1.0, "LL128": c("ll128_rate"), "Simple": c("simple_rate")}[plan.proto]
        self.wire = WIRE_FACTOR[plan.proto]
        scaling = c(f"{plan.proto.lower()}_scaling")
        # share of one channel in what all channels together stream
        self.share = (plan.channels / REFERENCE_CHANNELS) ** (scaling - 1.0)
        helpers = 32 if plan.proto == "Simple" else 0
        self.passed = PASS_BYTES_PER_THREAD[plan.proto] * max(plan.threads - helpers, 64)
        self.fixed_us = c("fixed_us") + (c("simple_fixed_us") if plan.proto == "Simple" else 0.0)
        self.fixed_us += (plan.channels - 1) * c("channel_us")
        self.spilled = self._spilled()

    def _spilled(self) -> float:
        """Slowdown of host memory whose lines no longer fit the cache."""
        plan, c = self.collective.plan, self.c
        step = self.collective.size_bytes / (self.collective.num_ranks * plan.channels)
        rings = self.collective.rings
        flows = sum(hop.transport == "shm" for ring in rings for hop in ring) / len(rings)
        used = flows * plan.channels * NUM_SLOTS * min(step, SLOT_BYTES[plan.proto]) * self.wire
        load: float = (used / (c("host_cache_mib") * 2.0**20)) ** SPILL_POWER
        return 1.0 + c("spill") * load / (1.0 + load)

    def handover_us(self, hop: Hop, step_bytes: float) -> float:
        """Latency of one hop, as in the analytic form."""
        first = min(step_bytes, self.passed)
        burst = 1.0 + self.c("burst") * first / (first + BURST_BYTES)
        handover = (hop.path_us + self.c(f"handoff_{hop.transport}_us")) * self.factor * burst
        if hop.transport == "shm" and self.collective.plan.proto == "Simple":
            handover += self.c("simple_host_crossings") * hop.path_us
        return handover

    def work(self, hop: Hop, step_bytes: float) -> list[tuple[DirectedLink, float]]:
        """The links of a hop, each with the time it is taken up by these bytes, us."""
        wire = step_bytes * self.wire * 1e-3
        efficiency = self.c(f"link_{hop.transport}")
        found = []
        for link in (link for leg in hop.legs for link in leg.links):
            rate = self.links.rate_gb_per_s[link] * efficiency
            if self.collapsed_rate is not None and self.writes.collapsed(link[0]):
                rate = min(rate, self.collapsed_rate)
            found.append((link, wire / rate))
        crossing = _crossing(hop)
        if crossing is not None:
            found.append((crossing, wire * self.spilled / self.c("socket_gb_per_s")))
        return found

    def servers(self, hop: Hop) -> list[DirectedLink]:
        """Everything that the data of a hop shares with other flows."""
        crossing = _crossing(hop)
        links = [link for leg in hop.legs for link in leg.links]
        return links if crossing is None else [*links, crossing]

    def pass_on(self, hop: Hop, step_bytes: float, inbox: simpy.Store) -> Process:
        """Work on one chunk and send it over ``hop``: the rank is busy meanwhile."""
        handover = self.handover_us(hop, step_bytes)
        busy = self.c("occupancy") * handover
        yield self.env.timeout(busy)
        on = self.servers(hop)
        self.links.enter(on)
        tokens = self.writes.enter(hop)
        # flows that begin at the same moment see each other
        yield self.env.timeout(0)
        on_links = self.links.time_us(self.work(hop, step_bytes))
        rate = self.c(f"channel_{hop.transport}_gb_per_s") * self.faster * self.share
        in_channel = max(0.0, step_bytes - self.passed) * 1e-3 / rate
        corner = self.c("corner")
        stream = (in_channel**corner + on_links**corner) ** (1.0 / corner)
        yield self.env.timeout(self.c("cut_through") * stream)
        inbox.put(self.env.now + handover - busy)
        yield self.env.timeout((1.0 - self.c("cut_through")) * stream)
        self.writes.leave(tokens)
        self.links.leave(on)

    def wait(self, inbox: simpy.Store) -> Process:
        """Take the next chunk: it may still be on its way."""
        ready = yield inbox.get()
        if ready > self.env.now:
            yield self.env.timeout(ready - self.env.now)

    def start_ring(self, arrivals_us: Sequence[float]) -> None:
        n, channels = self.collective.num_ranks, self.collective.plan.channels
        step = self.collective.size_bytes / (n * channels)
        for channel in range(channels):
            ring = self.collective.rings[channel % len(self.collective.rings)]
            inboxes = [simpy.Store(self.env) for _ in range(n)]
            for position, hop in enumerate(ring):
                self.env.process(
                    self._ring_rank(
                        hop, step, inboxes[position], inboxes[(position + 1) % n], arrivals_us
                    )
                )

    def _ring_rank(
        self,
        hop: Hop,
        step: float,
        inbox: simpy.Store,
        outbox: simpy.Store,
        arrivals_us: Sequence[float],
    ) -> Process:
        yield self.env.timeout(arrivals_us[hop.source] + self.fixed_us)
        for hops_done in range(2 * (self.collective.num_ranks - 1)):
            if hops_done:
                yield from self.wait(inbox)
            yield from self.pass_on(hop, step, outbox)
        yield from self.wait(inbox)
        self.done_us[hop.source] = max(self.done_us[hop.source], self.env.now)

    def start_tree(self, arrivals_us: Sequence[float]) -> None:
        """A tree on one node is a chain: pieces go up to the root and come down again."""
        n, plan = self.collective.num_ranks, self.collective.plan
        share = self.collective.size_bytes / plan.channels
        pieces = tree_pieces(share, SLOT_BYTES[plan.proto])
        for channel in range(plan.channels):
            at = channel % len(self.collective.rings)
            ring, back = self.collective.rings[at], self.collective.back[at]
            up = [simpy.Store(self.env) for _ in range(n)]
            down = [simpy.Store(self.env) for _ in range(n)]
            for position in range(n):
                self.env.process(
                    self._chain_rank(
                        ring, back, position, (pieces, share / pieces), (up, down), arrivals_us
                    )
                )

    def _chain_rank(
        self,
        ring: tuple[Hop, ...],
        back: tuple[Hop, ...],
        position: int,
        cut: tuple[int, float],
        inboxes: tuple[list[simpy.Store], list[simpy.Store]],
        arrivals_us: Sequence[float],
    ) -> Process:
        (pieces, step), (up, down), n = cut, inboxes, len(ring)
        rank = ring[position].source
        yield self.env.timeout(arrivals_us[rank] + self.fixed_us)
        for _ in range(pieces):
            if position < n - 1:
                yield from self.wait(up[position])
            if position > 0:
                yield from self.pass_on(back[position - 1], step, up[position - 1])
            else:
                yield from self.pass_on(ring[0], step, down[1])
        if position == 0:
            self.done_us[rank] = max(self.done_us[rank], self.env.now)
            return
        for _ in range(pieces):
            yield from self.wait(down[position])
            if position < n - 1:
                yield from self.pass_on(ring[position], step, down[position + 1])
        self.done_us[rank] = max(self.done_us[rank], self.env.now)
